"""Certificates for servers in tests."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from loomserve.platform.config import Tls

PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Pair:
    """A certificate that signs itself, and its key."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path) -> Tls:
        """Put both in place as renewal tools do, one after the other; the files' names."""
        for name, content in (("cert.pem", self.certificate), ("key.pem", self.key)):
            new = folder / f"{name}.new"
            new.touch(0o600)
            new.write_bytes(content)
            new.rename(folder / name)
        return Tls(certificate=str(folder / "cert.pem"), key=str(folder / "key.pem"))


def make_pair(
    *,
    name: str = "loomserve.test",
    starts: timedelta = timedelta(hours=-1),
    ends: timedelta = timedelta(days=90),
    private_key: PrivateKey | None = None,
    password: bytes | None = None,
    for_servers: bool = True,
) -> Pair:
    """``starts`` and ``ends`` from now on; loopback is among the certificate's names."""
    private_key = private_key or ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    usage = ExtendedKeyUsageOID.SERVER_AUTH if for_servers else ExtendedKeyUsageOID.CLIENT_AUTH
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(private_key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + starts)
        .not_valid_after(now + ends)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName(name), x509.IPAddress(ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        .sign(private_key, hashes.SHA256())
    )
    encryption = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return Pair(
        certificate.public_bytes(serialization.Encoding.PEM),
        private_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption
        ),
    )


def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)
