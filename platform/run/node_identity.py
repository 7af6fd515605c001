"""How processes of one platform know each other over a network: by a certificate of its own.

It is made of the internal token, so who has the token, and nobody else, shows it and trusts it. All
make the very same one: key, times and number are fixed, and Ed25519 adds nothing by chance. The
token itself never leaves a process.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
import tempfile
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_PURPOSE = b"loomserve: certificate of a platform's processes"
# It is good for as long as the token, of which there is another at each start.
_FROM, _UNTIL = datetime(2000, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, tzinfo=UTC)


@lru_cache(maxsize=4)
def server_context(token: str) -> ssl.SSLContext:
    """For servers: accepts connections of the platform's processes alone."""
    return _context(ssl.PROTOCOL_TLS_SERVER, token)


@lru_cache(maxsize=4)
def client_context(token: str) -> ssl.SSLContext:
    """For clients: connects to the platform's processes alone."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, token)


def _context(side: int, token: str) -> ssl.SSLContext:
    certificate, key = _certificate(token)
    context = ssl.SSLContext(side)
    # Its name is no host's: a process is known by its key, wherever it is.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=certificate.decode())
    # Python's ssl takes a key from a file only; this one is gone at once.
    with tempfile.NamedTemporaryFile() as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(key + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def _certificate(token: str) -> tuple[bytes, bytes]:
    """Certificate and key, in PEM."""
    seed = hmac.new(token.encode(), _PURPOSE, hashlib.sha256).digest()
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loomserve")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, algorithm=None)
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return certificate.public_bytes(Encoding.PEM), secret
