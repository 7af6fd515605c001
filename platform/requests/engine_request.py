"""A client's request on its way to an engine: parsed, checked, completed, encoded.

Fields by which the platform speaks to its engines travel in the request itself; a client that sets
one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.requests.policy.grammars import check_grammars
from loomserve.platform.scheduling.policy.background import BACKGROUND
from loomserve.platform.scheduling.policy.deadline import DEADLINE
from loomserve.platform.scheduling.policy.expected import EXPECTED, Expected

FORWARDED = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/embeddings",
    "/v1/tokenize",
    "/v1/detokenize",
)
"""vLLM's endpoints that take one request and keep nothing between requests."""
HINTED = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Endpoints whose requests have ``vllm_xargs``, which the engine gets as ``extra_args``."""

_ENGINE_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
_XARGS = "vllm_xargs"
_WITH_STREAM_OPTIONS = frozenset({"/v1/chat/completions", "/v1/completions"})
_STREAM_OPTIONS = "stream_options"
_INCLUDE_USAGE = "include_usage"
# vLLM's own: the usage not at the end alone.
_CONTINUOUS_USAGE = "continuous_usage_stats"
_KV_TRANSFER = "kv_transfer_params"
_HINTS = {
    DEADLINE: "set a deadline with the x-slo-ms header",
    BACKGROUND: "send work that may wait as a batch",
    EXPECTED: "lengths are predicted where models[].lengths says so; leave it out",
}
# vLLM's own bound.
_LONGEST_SALT = 1024


@dataclass(frozen=True)
class EngineRequest:
    """JSON object of one request to one of vLLM's endpoints.

    Immutable: a method that adds something returns another request. A request to which nothing was
    added is encoded as the very bytes that the client sent. The constructor checks nothing: it is
    for the platform's own requests.
    """

    path: str
    """The endpoint, as clients name it."""
    fields: Mapping[str, Any]
    received: bytes | None = field(default=None, repr=False)
    """The client's bytes, if they say exactly ``fields``."""

    @classmethod
    def of(cls, path: str, body: bytes) -> EngineRequest:
        """
        Raises:
            BadRequest: the body is no JSON object, has a field that only the platform may set, or
                one that would take too long to compile.
        """
        fields = _parse(body)
        _check(fields)
        return cls(path, fields, body)

    @classmethod
    def of_fields(cls, path: str, fields: Mapping[str, Any]) -> EngineRequest:
        """A client's request that was parsed elsewhere.

        Raises:
            BadRequest: it has a field that only the platform may set, or one that would take too
                long to compile.
        """
        _check(fields)
        return cls(path, fields)

    @property
    def engine_path(self) -> str:
        """The endpoint, as vLLM's server names it."""
        return _ENGINE_PATHS.get(self.path, self.path)

    @property
    def takes_hints(self) -> bool:
        """Whether the engine's scheduler can be told something about this request."""
        return self.path in HINTED

    @property
    def costs_tokens(self) -> bool:
        """Whether an engine's model computes it."""
        return self.path not in _ENGINE_PATHS

    @property
    def tells_usage(self) -> bool:
        """Whether the client has asked for the usage at the end of its stream."""
        options = self.fields.get(_STREAM_OPTIONS)
        return isinstance(options, dict) and bool(options.get(_INCLUDE_USAGE))

    def with_running_usage(self) -> EngineRequest | None:
        """The request of a stream whose every event tells the usage so far; None: it cannot."""
        options = self.fields.get(_STREAM_OPTIONS)
        if self.path not in _WITH_STREAM_OPTIONS or not isinstance(options, dict | None):
            return None
        if self.fields.get("stream") is not True:
            return None
        told = {**(options or {}), _INCLUDE_USAGE: True, _CONTINUOUS_USAGE: True}
        return EngineRequest(self.path, {**self.fields, _STREAM_OPTIONS: told})

    def isolated(self, tenant: str) -> EngineRequest:
        """The request with a ``cache_salt`` (vLLM's field) that no other tenant's can have.

        A salt of the client's own still keeps its requests apart from each other. Requests that
        need no KV blocks stay as they are.

        Raises:
            BadRequest: the client's own salt is none.
        """
        if self.path in _ENGINE_PATHS:
            return self
        own = self.fields.get("cache_salt")
        if own is not None and not (isinstance(own, str) and 0 < len(own) <= _LONGEST_SALT):
            raise BadRequest(
                f"cache_salt must be text of 1 to {_LONGEST_SALT} characters", param="cache_salt"
            )
        salt = hashlib.sha256(json.dumps([tenant, own]).encode()).hexdigest()
        return EngineRequest(self.path, {**self.fields, "cache_salt": salt})

    def with_hints(
        self,
        *,
        deadline: float | None = None,
        expected: Expected | None = None,
        background: bool = False,
    ) -> EngineRequest:
        """The request with what the engine's scheduler is told about it.

        Where vLLM has no place for hints, or will refuse the client's ``vllm_xargs``, the request
        stays as it is.

        Args:
            deadline: when the client wants the whole answer, Unix seconds.
            expected: predicted length of the answer.
            background: serve it after all requests that are not in the background.
        """
        hints: dict[str, Any] = {}
        if deadline is not None:
            hints[DEADLINE] = deadline
        if expected is not None:
            hints[EXPECTED] = [expected.tokens, expected.high]
        if background:
            hints[BACKGROUND] = 1
        own = self.fields.get(_XARGS)
        if not hints or not self.takes_hints or not isinstance(own, dict | None):
            return self
        return EngineRequest(self.path, {**self.fields, _XARGS: {**(own or {}), **hints}})

    @cached_property
    def encoded(self) -> bytes:
        """The bytes that the engine gets."""
        return json.dumps(self.fields).encode() if self.received is None else self.received


def _parse(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not UTF-8: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise BadRequest('the body must be a JSON object, such as {"model": …, "messages": […]}')
    return parsed


def _check(fields: Mapping[str, Any]) -> None:
    _refuse_platform_fields(fields)
    check_grammars(fields)


def _refuse_platform_fields(fields: Mapping[str, Any]) -> None:
    given = fields.get(_XARGS)
    extra = given if isinstance(given, dict) else {}
    if fields.get(_KV_TRANSFER) is not None or extra.get(_KV_TRANSFER) is not None:
        raise BadRequest(
            f"{_KV_TRANSFER} is the platform's own channel to its engines; leave it out",
            param=_KV_TRANSFER,
        )
    for hint, instead in _HINTS.items():
        if hint in extra:
            raise BadRequest(f"{hint} is the platform's own; {instead}", param=hint)
