"""Checks of keys, certificates and sockets that `penstock serve` makes before it starts anything."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from penstock.config import ServerConfig
from penstock.errors import ConfigError

SECRET_FLAGS = (
    *("--api-key", "--admin-key", "--ssl-keyfile-password", "--hf-token", "--hf-api-token"),
    "--result-cache-redis",  # its URL may hold a password
)
KEY_VARIABLES = ("PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY")
SECRET_VARIABLES = (*KEY_VARIABLES, "PENSTOCK_SSL_KEYFILE_PASSWORD")
log = logging.getLogger("penstock.serve")


def forget_secret_variables() -> None:
    """Remove secrets from the environment after they have been read. No child process needs them."""
    for name in SECRET_VARIABLES:
        value = os.environ.pop(name, None)
        if value == "":
            log.warning("%s is empty, which sets nothing", name)
        elif value is not None and name in KEY_VARIABLES:
            keys = [key.strip() for key in value.split(",")]
            if any(len(key.split()) > 1 for key in keys):  # the parser would read each word as a key
                raise ConfigError(f"{name} has a key with a space; separate keys by commas", param=name)


def check_protection(config: ServerConfig) -> None:
    """Refuse settings that protect less than they seem to, and files that cannot be used."""
    _check_sockets(config)
    _check_key_files(config)
    _check_tls(config)


def _check_sockets(config: ServerConfig) -> None:
    if config.admin_host is not None and config.admin_port is None:
        raise ConfigError("--admin-host needs --admin-port", param="admin_host")
    if config.uds is None and config.uds_permissions != ServerConfig().uds_permissions:
        raise ConfigError("--uds-permissions needs --uds", param="uds_permissions")


def _check_key_files(config: ServerConfig) -> None:
    from penstock.api.key_file import read_key_file, warning_about

    for path, flag in ((config.api_key_file, "--api-key-file"), (config.admin_key_file, "--admin-key-file")):
        if path is not None:
            records = read_key_file(path, flag)
            if (warning := warning_about(path, flag, records)) is not None:
                log.warning("%s", warning)


def _check_tls(config: ServerConfig) -> None:
    if config.ssl_certfile is None:
        given = (
            ("--ssl-keyfile", config.ssl_keyfile),
            ("--ssl-ca-certs", config.ssl_ca_certs),
            ("--ssl-cert-reqs", None if config.ssl_cert_reqs == "none" else config.ssl_cert_reqs),
            ("--ssl-ciphers", config.ssl_ciphers),
        )
        for flag, value in given:
            if value is not None:
                raise ConfigError(f"{flag} needs --ssl-certfile", param=flag)
        return
    if config.ssl_ca_certs is not None and config.ssl_cert_reqs == "none":
        raise ConfigError(
            "--ssl-ca-certs checks nobody without --ssl-cert-reqs required or optional", param="ssl_cert_reqs"
        )
    if config.ssl_ca_certs is None and config.ssl_cert_reqs != "none":
        raise ConfigError(
            f"--ssl-cert-reqs {config.ssl_cert_reqs} needs --ssl-ca-certs, the authorities that sign "
            "certificates of clients",
            param="ssl_ca_certs",
        )
    from penstock.api.tls import server_context

    server_context(config)  # raises an error that names the bad file
    key = config.ssl_keyfile or config.ssl_certfile
    if Path(key).stat().st_mode & 0o004:
        log.warning("every user of this machine can read the private key %r; run chmod 600 on it", key)
