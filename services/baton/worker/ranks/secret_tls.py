"""Mutual TLS where processes share a secret and have no certificates: both sides derive the same one from it.

Who does not know the secret has no key for that certificate, and takes no other. It says nothing of hosts.
"""

from __future__ import annotations

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from baton.rpc.authentication import ClusterTls

NAME = "ranks.baton"


def tls_of_secret(secret: str) -> ClusterTls:
    """Equal secrets give the same bytes: an Ed25519 key by HKDF (RFC 5869), and its self-signed certificate,
    which is its own CA. Who connects can try guesses of the secret elsewhere, so it must be random."""
    seed = HKDF(SHA256(), 32, salt=None, info=b"baton ranks").derive(secret.encode())
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime(2000, 1, 1))
        .not_valid_after(datetime(9999, 12, 31, 23, 59, 59))  # RFC 5280, 4.1.2.5: none is known
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
        .sign(key, None)
        .public_bytes(Encoding.PEM)
    )
    return ClusterTls(cert, cert, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), NAME)
