"""Certificates for tests, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl program")


class Authority:
    """A certificate authority whose files are in `folder`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self.folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(self._key))
        new = ("req", "-x509", "-new", "-days", "2", "-subj", f"/CN={name}", "-key", str(self._key))
        _openssl(*new, "-out", str(self.certificate))

    def sign(self, name: str, password: str | None = None) -> tuple[Path, Path]:
        """Create a certificate for 127.0.0.1 and localhost, and its key."""
        certificate, key = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(key))
        request, names = self.folder / f"{name}.csr", self.folder / "names.cnf"
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        _openssl("req", "-new", "-key", str(key), "-subj", f"/CN={name}", "-out", str(request))
        signed_by = ("-CA", str(self.certificate), "-CAkey", str(self._key), "-CAcreateserial")
        sign = ("x509", "-req", "-days", "2", "-in", str(request), *signed_by, "-extfile", str(names))
        _openssl(*sign, "-out", str(certificate))
        if password is not None:
            _openssl("ec", "-in", str(key), "-aes256", "-passout", f"pass:{password}", "-out", str(key))
        key.chmod(0o600)
        return certificate, key


def _openssl(*arguments: str) -> None:
    ran = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=PATIENCE_S)
    assert ran.returncode == 0, ran.stderr
