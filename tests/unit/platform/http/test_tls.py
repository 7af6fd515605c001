"""The server's certificate: what is refused, and how it is replaced."""

from __future__ import annotations

import logging
import ssl
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Tls
from loomserve.platform.http.tls import LiveCertificate, beside, load, trust_in
from tests.unit.certificates import Pair, make_pair, rsa_key


def shown_to(server: ssl.SSLContext, trusted: Pair, folder: Path) -> None:
    """Shake hands in memory as a client that trusts ``trusted`` alone."""
    (folder / "trusted.pem").write_bytes(trusted.certificate)
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trust_in(folder / "trusted.pem").wrap_bio(to_client, to_server)
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    for end in (client, accepting):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    client.do_handshake()


def test_names_of_files_are_relative_to_the_configuration(tmp_path: Path) -> None:
    assert beside(Tls(certificate="tls/cert.pem", key="/etc/key.pem"), tmp_path) == Tls(
        certificate=str(tmp_path / "tls/cert.pem"), key="/etc/key.pem"
    )


@pytest.mark.parametrize(("version", "served"), [("TLSv1_1", False), ("TLSv1_2", True)])
def test_old_versions_of_tls_are_refused(version: str, served: bool, tmp_path: Path) -> None:
    pair = make_pair()
    server = load(pair.write(tmp_path))
    assert server.minimum_version == ssl.TLSVersion.TLSv1_2
    old = trust_in(tmp_path / "cert.pem")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        old.minimum_version = old.maximum_version = ssl.TLSVersion[version]
    old.set_ciphers("ALL:@SECLEVEL=0")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        old.wrap_bio(to_client, to_server).do_handshake()
    with pytest.raises(ssl.SSLWantReadError if served else ssl.SSLError) as refused:
        server.wrap_bio(to_server, to_client, server_side=True).do_handshake()
    assert served == (refused.value.reason != "UNSUPPORTED_PROTOCOL")


def mismatched(folder: Path) -> Tls:
    tls = make_pair().write(folder)
    Path(tls.certificate).write_bytes(make_pair().certificate)
    return tls


def without_file(folder: Path) -> Tls:
    tls = make_pair().write(folder)
    Path(tls.key).unlink()
    return tls


def with_text(field: str, text: str) -> Callable[[Path], Tls]:
    def make(folder: Path) -> Tls:
        tls = make_pair().write(folder)
        Path(getattr(tls, field)).write_text(text)
        return tls

    return make


def with_mode(mode: int) -> Callable[[Path], Tls]:
    def make(folder: Path) -> Tls:
        tls = make_pair().write(folder)
        Path(tls.key).chmod(mode)
        return tls

    return make


def broken_block(kind: str) -> str:
    return f"-----BEGIN {kind}-----\nMIIB\n-----END {kind}-----\n"


BROKEN: dict[str, tuple[Callable[[Path], Tls], str]] = {
    "another's key": (mismatched, "tls.key.*another certificate"),
    "no file": (without_file, "tls.key.*cannot be read"),
    "no certificate": (with_text("certificate", "hello"), "tls.certificate.*holds no certificate"),
    "no key": (with_text("key", "hello"), "tls.key.*holds no private key"),
    "a damaged certificate": (
        with_text("certificate", broken_block("CERTIFICATE")),
        "tls.certificate.*cannot be used",
    ),
    "a damaged key": (with_text("key", broken_block("PRIVATE KEY")), "tls.key.*cannot be used"),
    "a key for all to read": (with_mode(0o604), r"tls.key.*mode 0604.*chmod 600"),
    "a key for its group to write": (with_mode(0o620), "tls.key.*mode 0620"),
    "an encrypted key": (
        lambda folder: make_pair(password=b"secret").write(folder),
        "tls.key.*encrypted",
    ),
    "an old certificate": (
        lambda folder: make_pair(ends=timedelta(minutes=-1)).write(folder),
        "tls.certificate.*expired",
    ),
    "a certificate of the future": (
        lambda folder: make_pair(starts=timedelta(days=1)).write(folder),
        "tls.certificate.*not yet valid",
    ),
    "a client's certificate": (
        lambda folder: make_pair(for_servers=False).write(folder),
        "tls.certificate.*clients refuse.*purpose",
    ),
}


@pytest.mark.parametrize(("make", "says"), BROKEN.values(), ids=BROKEN)
def test_what_clients_could_not_connect_to_is_refused_by_field(
    make: Callable[[Path], Tls], says: str, tmp_path: Path
) -> None:
    with pytest.raises(StartError, match=says):
        load(make(tmp_path))


def test_new_files_are_shown_to_new_connections_whatever_their_key(tmp_path: Path) -> None:
    old, new = make_pair(private_key=rsa_key()), make_pair()
    live = LiveCertificate(old.write(tmp_path))
    shown_to(live.context, old, tmp_path)
    new.write(tmp_path)
    live.refresh()
    shown_to(live.context, new, tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError):
        shown_to(live.context, old, tmp_path)
    only_rsa = trust_in(tmp_path / "cert.pem")
    only_rsa.maximum_version = ssl.TLSVersion.TLSv1_2
    only_rsa.set_ciphers("aRSA")
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = only_rsa.wrap_bio(to_client, to_server)
    accepting = live.context.wrap_bio(to_server, to_client, server_side=True)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    with pytest.raises(ssl.SSLError, match="NO_SHARED_CIPHER"):
        accepting.do_handshake()


@pytest.mark.parametrize(
    "make", [make for make, _ in BROKEN.values()], ids=[f"then {name}" for name in BROKEN]
)
def test_broken_new_files_are_told_once_and_the_certificate_stays(
    make: Callable[[Path], Tls], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_pair()
    live = LiveCertificate(first.write(tmp_path))
    make(tmp_path)
    for _ in range(3):
        live.refresh()
    told = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert len(told) == 1
    assert "server.tls" in told[0].getMessage()
    shown_to(live.context, first, tmp_path)


def test_files_that_are_whole_again_are_taken_over(tmp_path: Path) -> None:
    live = LiveCertificate(make_pair().write(tmp_path))
    without_file(tmp_path)
    live.refresh()
    second = make_pair()
    second.write(tmp_path)
    live.refresh()
    shown_to(live.context, second, tmp_path)
