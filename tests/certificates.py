"""An authority and certificates for tests, made by the openssl program."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True, timeout=60)


@dataclass(frozen=True)
class Authority:
    """Signs certificates for 127.0.0.1, localhost and other names, in a folder of its own."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Authority:
        folder.mkdir(parents=True)
        _openssl(
            folder,
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca"),
        )
        return cls(folder)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def certificate(self, name: str, *others: str) -> tuple[Path, Path]:
        """(certificate, key); `others`: further names as openssl writes them, e.g. DNS:buffer."""
        _openssl(
            self.folder,
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}"),
        )
        extensions = self.folder / f"{name}.ext"
        names = ",".join(("IP:127.0.0.1", "DNS:localhost", *others))
        extensions.write_text(f"subjectAltName={names}\n")
        _openssl(
            self.folder,
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", extensions.name),
            *("-out", f"{name}.pem"),
        )
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def tls_dir(self, name: str) -> Path:
        """A new certificate as `security.tls_dir` takes it."""
        certificate, key = self.certificate(name)
        folder = self.folder / f"{name}.tls"
        folder.mkdir()
        certificate.rename(folder / "tls.crt")
        key.rename(folder / "tls.key")
        (folder / "ca.crt").write_bytes(self.ca.read_bytes())
        return folder
