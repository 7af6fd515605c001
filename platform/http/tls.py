"""The server's certificate: checked as clients check it, and replaced while connections go on."""

from __future__ import annotations

import contextlib
import logging
import re
import ssl
import stat
from pathlib import Path
from typing import Any, NoReturn

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.files import FileStamp, stamp
from loomserve.platform.config import Tls

_log = logging.getLogger("ray.serve")

_CERTIFICATE = re.compile(
    "-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL | re.ASCII
)
_CERTIFICATE_FIELD = "server.tls.certificate"
_KEY_FIELD = "server.tls.key"


def beside(tls: Tls, folder: Path) -> Tls:
    """The same files with paths relative to ``folder`` made absolute."""
    return Tls(
        certificate=str((folder / Path(tls.certificate).expanduser()).absolute()),
        key=str((folder / Path(tls.key).expanduser()).absolute()),
    )


def trust_in(certificate: Path) -> ssl.SSLContext:
    """A client's context that trusts a file's first certificate, whatever its name; or
    StartError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # A server is asked by an address on its own machine, and certificates seldom name one.
    context.check_hostname = False
    # Else only certificates of authorities would be trusted in themselves.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    first = _CERTIFICATE.search(_read(certificate, _CERTIFICATE_FIELD))
    if first is None:
        raise StartError(f"{_CERTIFICATE_FIELD}: {certificate} holds no certificate in PEM")
    try:
        context.load_verify_locations(cadata=first[0])
    except ssl.SSLError as error:
        raise _unusable(_CERTIFICATE_FIELD, certificate, error) from None
    return context


def load(tls: Tls) -> ssl.SSLContext:
    """The server's context; raises StartError, which names the field, for wrong files."""
    certificate, key = Path(tls.certificate), Path(tls.key)
    trust = trust_in(certificate)
    _check_key(key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without this function OpenSSL would ask on the terminal.
        context.load_cert_chain(certificate, key, password=_refuse_encrypted)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise StartError(
                f"{_KEY_FIELD}: {key} is the key of another certificate than {certificate}"
            ) from None
        raise _unusable(_KEY_FIELD, f"{certificate} with {key}", error) from None
    try:
        _shake_hands(context, trust)
    except ssl.SSLCertVerificationError as error:
        raise StartError(
            f"{_CERTIFICATE_FIELD}: clients refuse {certificate}: {error.verify_message}"
        ) from None
    except ssl.SSLError as error:
        raise _unusable(_CERTIFICATE_FIELD, certificate, error) from None
    return context


def expires_at(tls: Tls) -> float:
    """When the certificate expires, in Unix seconds; raises StartError as :func:`load`."""
    shown = _shake_hands(load(tls), trust_in(Path(tls.certificate)))
    return ssl.cert_time_to_seconds(str(shown["notAfter"]))


class LiveCertificate:
    """The certificate in the files now, which new connections get; raises StartError if unusable.

    Each has its own context: loaded into a context in use it would stand beside the former one if
    their keys are of two kinds, and a broken one would spoil both.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen = self._stamps()
        self._newest = self.context = load(tls)
        self.context.sni_callback = self._show_newest

    def refresh(self) -> None:
        """Load new files; broken ones are logged once, and the certificate stays."""
        seen = self._stamps()
        if seen == self._seen:
            return
        self._seen = seen
        try:
            self._newest = load(self._tls)
        except StartError as error:
            _log.error("%s; the certificate stays that was loaded before", error)
        else:
            # Not as information, which Serve's deployments do not log.
            _log.warning("new connections are shown the new certificate %s", self._tls.certificate)

    def _stamps(self) -> tuple[FileStamp | None, ...]:
        return stamp(Path(self._tls.certificate)), stamp(Path(self._tls.key))

    def _show_newest(
        self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        # Called whether the client names a server or not.
        connection.context = self._newest


def _shake_hands(server: ssl.SSLContext, client: ssl.SSLContext) -> dict[str, Any]:
    """The certificate as a client sees it, by a handshake in memory; raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    connecting = client.wrap_bio(to_client, to_server)
    accepting = server.wrap_bio(to_server, to_client, server_side=True)
    # Of TLS 1.3, which both speak, a client has seen all after two messages.
    for end in (connecting, accepting):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    connecting.do_handshake()
    return connecting.getpeercert() or {}


def _check_key(key: Path) -> None:
    text = _read(key, _KEY_FIELD)
    status = key.stat()
    # Keys of the system's own may be for a group, as Debian's are.
    open_to = 0o037 if status.st_uid == 0 else 0o077
    if status.st_mode & open_to:
        raise StartError(
            f"{_KEY_FIELD}: {key} is open to other users (mode "
            f"{stat.S_IMODE(status.st_mode):04o}): chmod 600 it; if others may have read it, have "
            "a new certificate made"
        )
    if "PRIVATE KEY-----" not in text:
        raise StartError(f"{_KEY_FIELD}: {key} holds no private key in PEM")


def _refuse_encrypted() -> NoReturn:
    raise StartError(
        f"{_KEY_FIELD}: the key is encrypted, and nobody is there to type its password at each "
        "start: write it in clear (openssl pkey -in KEY -out NEW), readable by its user only"
    )


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise StartError(f"{field}: {path} cannot be read ({error.strerror})") from None


def _unusable(field: str, what: object, error: ssl.SSLError) -> StartError:
    return StartError(f"{field}: {what} cannot be used ({error.reason or error})")
