"""TLS of the server: its certificate, the certificates of clients, and their renewal.

A renewed certificate is loaded into a new context. Every handshake uses the newest context that was loaded
without an error, so a half-written file never reaches a client.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

from penstock.api.watched_files import WatchedFiles
from penstock.config import ServerConfig
from penstock.errors import ConfigError

log = logging.getLogger("penstock.api")
_REQUIREMENTS = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}


class ServerTls:
    """The TLS settings of a running server."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._current = server_context(config)
        self.context = server_context(config)  # for the listeners
        self.context.sni_callback = self._choose
        self._watched = WatchedFiles(_files(config))
        self._watched.have_changed()
        self._reported = ""

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """Use the newest context. Called for every handshake, even if the client names no host."""
        handshake.context = self._current

    def reload(self) -> None:
        """Load the files again if they have changed. If they have an error, the last ones stay in use."""
        if not self._watched.have_changed():
            return
        try:
            self._current = server_context(self._config)
        except ConfigError as error:
            if error.message != self._reported:
                log.error("%s; the certificate that was loaded before stays in use", error.message)
            self._reported = error.message
        else:
            self._reported = ""


def _files(config: ServerConfig) -> list[str]:
    files = (config.ssl_certfile, config.ssl_keyfile, config.ssl_keyfile_password_file, config.ssl_ca_certs)
    return [file for file in files if file is not None]


def server_context(config: ServerConfig) -> ssl.SSLContext:
    """The context of these files, or an error that names the one at fault."""
    assert config.ssl_certfile is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, config, config.ssl_certfile)
    context.verify_mode = _REQUIREMENTS[config.ssl_cert_reqs]
    if config.ssl_ca_certs is not None:
        _check_readable("--ssl-ca-certs", config.ssl_ca_certs)
        try:
            context.load_verify_locations(config.ssl_ca_certs)
        except ssl.SSLError:
            raise _refused(
                "--ssl-ca-certs", config.ssl_ca_certs, "it has no certificate in PEM format"
            ) from None
    if config.ssl_ciphers is not None:
        try:
            context.set_ciphers(config.ssl_ciphers)
        except ssl.SSLError:
            raise ConfigError(
                f"--ssl-ciphers is {config.ssl_ciphers!r}, which names no cipher of OpenSSL; use a list such "
                "as ECDHE+AESGCM",
                param="--ssl-ciphers",
            ) from None
    return context


def _load_certificate(context: ssl.SSLContext, config: ServerConfig, certificate: str) -> None:
    key = config.ssl_keyfile or certificate
    _check_readable("--ssl-certfile", certificate)
    _check_readable("--ssl-keyfile", key)
    if b"-----BEGIN CERTIFICATE-----" not in Path(certificate).read_bytes():
        raise _refused("--ssl-certfile", certificate, "it has no certificate in PEM format")
    if b"PRIVATE KEY-----" not in Path(key).read_bytes():
        raise _refused("--ssl-keyfile", key, "it has no private key in PEM format")
    password = _password(config)
    is_asked = False

    def give_password() -> Any:
        nonlocal is_asked
        is_asked = True
        return password or ""

    try:
        context.load_cert_chain(certificate, config.ssl_keyfile, give_password)
    except (ssl.SSLError, ValueError) as error:
        if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
            raise _refused(
                "--ssl-keyfile", key, f"it does not belong to the certificate {certificate!r}"
            ) from None
        if is_asked and not password:
            why = "it is encrypted; set PENSTOCK_SSL_KEYFILE_PASSWORD or --ssl-keyfile-password-file"
            raise _refused("--ssl-keyfile", key, why) from None
        if is_asked:
            raise _refused("--ssl-keyfile", key, "its password is wrong") from None
        raise _refused("--ssl-certfile", certificate, "the certificate or its key is damaged") from None


def _password(config: ServerConfig) -> str | None:
    if config.ssl_keyfile_password_file is None:
        return config.ssl_keyfile_password
    _check_readable("--ssl-keyfile-password-file", config.ssl_keyfile_password_file)
    lines = Path(config.ssl_keyfile_password_file).read_text(encoding="utf-8", errors="replace").splitlines()
    return lines[0] if lines else None


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).open("rb").close()
    except OSError as error:
        raise _refused(flag, path, error.strerror or "it cannot be opened") from None


def _refused(flag: str, path: str, why: str) -> ConfigError:
    return ConfigError(f"{flag} {path!r} cannot be used: {why}", param=flag)
