"""Calls of a platform's admin API, by commands that take ``--url`` and ``--token``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, Concatenate, ParamSpec, Self, TypeVar

import httpx
import typer
from pydantic import BaseModel, ValidationError

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.cli.admin_token import on_this_machine, only_to_own_user, token_for
from loomserve.platform.state import PlatformState

_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 10.0

_Url = Annotated[str, typer.Option(help="Where the platform listens.")]
_Token = Annotated[
    str | None,
    typer.Option(
        envvar="LOOMSERVE_ADMIN_TOKEN",
        help="The admin token; of a platform on this machine it is found without.",
    ),
]
M = TypeVar("M", bound=BaseModel)
P = ParamSpec("P")


class StatusError(LoomserveError):
    """The platform did not answer; the message says what to do."""


class AdminError(LoomserveError):
    """The platform refused; the message is its own."""


class AdminClient:
    """Client of one platform's admin API.

    Without a token it sends the user's own to a platform on this machine. All calls raise:

        StatusError: nothing listens, or the token is missing or wrong.
        AdminError: the platform refuses.
        StartError: the file of the user's own token cannot be trusted, or another user listens.
    """

    def __init__(
        self, url: str, token: str | None = None, transport: httpx.BaseTransport | None = None
    ) -> None:
        self._url, self._token = url, token
        # A proxy that the environment names may be on another machine, which would see the token.
        direct = httpx.HTTPTransport() if on_this_machine(url) else None
        self._client = httpx.Client(timeout=_TIMEOUT_S, transport=transport or direct)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str, kind: type[M]) -> M:
        return kind.model_validate_json(self.carry_out("GET", path).content)

    def carry_out(self, method: str, path: str, body: object = None) -> httpx.Response:
        """The answer to a call that the platform has carried out."""
        answer = self.ask(path, method, body)
        if answer.is_success:
            return answer
        try:
            raise AdminError(str(answer.json()["error"]["message"]))
        except (ValueError, KeyError, TypeError):
            raise AdminError(
                f"{answer.url} answered {answer.status_code}, which is not Loomserve's: check --url"
            ) from None

    def state(self) -> PlatformState:
        """The platform's state; StatusError also if there is none in the answer."""
        answer = self.ask("state")
        if answer.is_server_error:
            raise StatusError(
                f"{self._url} answered {answer.status_code}; it may still be starting: try again, "
                "then look at the log of loomserve serve"
            )
        try:
            return PlatformState.model_validate_json(answer.content if answer.is_success else b"")
        except ValidationError:
            raise StatusError(
                f"{self._url} answered {answer.status_code} with something that is not Loomserve's "
                "state; it may be the port of clients (server.admin_port is that of operators), "
                "another server, or another version: check --url"
            ) from None

    def ask(self, path: str, method: str = "GET", body: object = None) -> httpx.Response:
        """Any answer, also one that refuses, unless it refuses the token."""
        token = self._token or token_for(self._url)
        try:
            answer = self._client.request(
                method,
                f"{self._url.rstrip('/')}/admin/v1/{path}",
                headers={"Authorization": f"Bearer {token}"} if token else {},
                json=body,
                extensions=only_to_own_user(self._url) if token else None,
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise StatusError(self._why_not(error)) from None
        if answer.status_code in {401, 403}:
            raise StatusError(
                f"{self._url} {'refuses this admin token' if token else 'asks for an admin token'};"
                " pass it with --token or LOOMSERVE_ADMIN_TOKEN; loomserve serve says where it is"
            )
        return answer

    def _why_not(self, error: Exception) -> str:
        match error:
            case httpx.TimeoutException():
                return (
                    f"{self._url} did not answer within {_TIMEOUT_S:.0f} s; look at the log of "
                    "loomserve serve"
                )
            case httpx.InvalidURL() | httpx.UnsupportedProtocol():
                return f"--url {self._url!r}: {error}; write it like {_DEFAULT_URL}"
            case _ if "CERTIFICATE_VERIFY_FAILED" in str(error):
                remedy = (
                    "set SSL_CERT_FILE to its certificate or its authority's, and give --url a "
                    "name that the certificate has"
                )
            case _:
                remedy = (
                    "start the platform with `loomserve serve`, or pass --url if it listens "
                    "elsewhere, or with TLS (https://)"
                )
        return f"cannot reach {self._url} ({error}); {remedy}"


def asks_platform(command: Callable[Concatenate[AdminClient, P], None]) -> Callable[..., None]:
    """The command, whose first parameter is made of two options, ``--url`` and ``--token``."""

    def called(*, url: str, token: str | None, **given: object) -> None:
        with AdminClient(url, token) as platform:
            command(platform, **given)  # type: ignore[call-arg, arg-type]

    keyword = inspect.Parameter.KEYWORD_ONLY
    _, *own = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        *(each.replace(kind=keyword) for each in own),
        inspect.Parameter("url", keyword, default=_DEFAULT_URL, annotation=_Url),
        inspect.Parameter("token", keyword, default=None, annotation=_Token),
    ]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return called


class AdminCommands(typer.Typer):
    """Group of commands, of which each takes the platform that it asks as its first parameter."""

    def command(self, name: str | None = None, **options: Any) -> Callable[..., Any]:
        decorate = super().command(name, **options)
        return lambda command: decorate(asks_platform(command))

    def callback(self, **options: Any) -> Callable[..., Any]:
        decorate = super().callback(**options)
        return lambda command: decorate(asks_platform(command))
