"""Certificates of a CA that lives as long as a test."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Pem:
    """Paths of PEM files."""

    ca: str
    cert: str
    key: str


def make(folder: Path, name: str = "127.0.0.1") -> Pem:
    """A new CA, and a certificate of it for `name`."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert(name)
    pem = Pem(*(str(folder / part) for part in ("ca.pem", "cert.pem", "key.pem")))
    authority.cert_pem.write_to_path(pem.ca)
    Path(pem.cert).write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    issued.private_key_pem.write_to_path(pem.key)
    Path(pem.key).chmod(0o600)
    return pem
