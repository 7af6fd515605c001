"""A client's request on its way to an engine: parsed, checked, completed, encoded.

Fields by which the platform speaks to its engines travel in the request itself; a client that sets
one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from loomserve.platform.base.errors import BadRequest, BodyTooLarge, ContextTooLong
from loomserve.platform.requests.client_body import TEXTS, read_body, texts_of, with_fields
from loomserve.platform.requests.policy.conversation import check_conversation
from loomserve.platform.requests.policy.grammars import check_grammars
from loomserve.platform.requests.policy.numbers import check_numbers
from loomserve.platform.requests.policy.sequences import (
    MOST_EMBEDDINGS,
    answers,
    prompts_in,
    prompts_in_json,
)
from loomserve.platform.requests.policy.texts import CHARACTERS_PER_TOKEN, characters
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

MOST_TOKENIZE_BYTES = 2**20
"""Body of a request that asks for tokens or their text, which are made one request at a time."""

_EMBEDDINGS = "/v1/embeddings"
_RESPONSES = "/v1/responses"
# Fields with several prompts, each of which is answered.
_PROMPTS = {"/v1/completions": ("prompt", "prompt_embeds"), _EMBEDDINGS: ("input",)}
_ENGINE_PATHS = {"/v1/tokenize": "/tokenize", "/v1/detokenize": "/detokenize"}
_XARGS = "vllm_xargs"
_KV_TRANSFER = "kv_transfer_params"
_HINTS = {
    DEADLINE: "set a deadline with the x-slo-ms header",
    BACKGROUND: "send work that may wait as a batch",
    EXPECTED: "lengths are predicted where models[].lengths says so; leave it out",
}
# vLLM's own bound.
_LONGEST_SALT = 1024


def engine_path(path: str) -> str:
    """An endpoint as vLLM's server names it."""
    return _ENGINE_PATHS.get(path, path)


@dataclass(frozen=True)
class EngineRequest:
    """JSON object of one request to one of vLLM's endpoints.

    Immutable: a method that adds something returns another request. The engine gets the very bytes
    that the client sent, with what was added at their end. The constructor checks nothing: it is
    for the platform's own requests.
    """

    path: str
    """The endpoint, as clients name it."""
    fields: Mapping[str, Any]
    """Without texts that were left as JSON."""
    received: bytes | None = field(default=None, repr=False)
    """The client's bytes; None: the request is the platform's own, or was parsed elsewhere."""
    texts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Fields of a large body that were left as JSON."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the client's bytes do not have, or have otherwise."""

    @classmethod
    def of(cls, path: str, body: bytes) -> EngineRequest:
        """
        Raises:
            BadRequest: the body is no JSON object, has a field that only the platform may set, or
                one that would take too long to compile.
            BodyTooLarge: it asks for more tokens than one request may.
        """
        if path in _ENGINE_PATHS and len(body) > MOST_TOKENIZE_BYTES:
            raise BodyTooLarge(f"A request to {path} may have {MOST_TOKENIZE_BYTES} bytes.")
        fields, texts = read_body(body)
        _check(path, fields)
        return cls(path, fields, body, texts)

    @classmethod
    def of_fields(cls, path: str, fields: Mapping[str, Any]) -> EngineRequest:
        """A client's request that was parsed elsewhere.

        Raises:
            BadRequest: it has a field that only the platform may set, or one that would take too
                long to compile.
        """
        _check(path, fields)
        return cls(path, fields)

    @property
    def engine_path(self) -> str:
        """The endpoint, as vLLM's server names it."""
        return engine_path(self.path)

    @property
    def takes_hints(self) -> bool:
        """Whether the engine's scheduler can be told something about this request."""
        return self.path in HINTED

    @property
    def costs_tokens(self) -> bool:
        """Whether an engine's model computes it."""
        return self.path not in _ENGINE_PATHS

    @cached_property
    def sequences(self) -> int:
        """Answers that the engine has at work at once for it; texts to embed count as one."""
        if self.path == _EMBEDDINGS:
            return 1
        return self._prompts * answers(self.fields)

    @cached_property
    def _prompts(self) -> int:
        names = _PROMPTS.get(self.path, ())
        left = [prompts_in_json(self.texts[name]) for name in names if name in self.texts]
        read = [prompts_in(self.fields[name]) for name in names if name in self.fields]
        return sum(left + read) or 1

    def check_sequences(self, most: int) -> None:
        """
        Raises:
            BadRequest: more than ``most`` sequences, or texts to embed than vLLM takes.
        """
        if self.path == _EMBEDDINGS and self._prompts > MOST_EMBEDDINGS:
            raise BadRequest(
                f"input has {self._prompts} texts, of which one request may have "
                f"{MOST_EMBEDDINGS}; send several",
                param="input",
            )
        if self.sequences > most:
            raise BadRequest(
                f"{self._prompts} prompts with {answers(self.fields)} answers each are "
                f"{self.sequences} sequences, of which one request may have {most}; send several "
                "requests",
                param="n" if self._prompts <= most else "prompt",
            )

    def check_texts(self, max_model_len: int | None) -> None:
        """
        Raises:
            ContextTooLong: its texts are longer than any that fits the model's context.
        """
        if max_model_len is None:
            return
        most = max_model_len * CHARACTERS_PER_TOKEN
        # Most requests are small.
        if len(self.encoded) <= most:
            return
        found = {
            name: characters(text)
            for name, text in (self.texts or texts_of(self.encoded)).items()
            if name != "prompt_embeds"
        }
        if (length := sum(found.values())) > most * self._prompts:
            raise ContextTooLong(
                f"This model's maximum context length is {max_model_len} tokens, and the request "
                f"has {length} characters of text, more than fit. Shorten it.",
                param=max(found, key=lambda name: found[name]),
            )

    def for_model(self, model: str) -> EngineRequest:
        """The request to a model, which may name it by an alias."""
        named = self.fields.get("model")
        return self if named is None or named == model else self._with({"model": model})

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
        return self._with({"cache_salt": salt})

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
            deadline: when the client wants the whole answer, monotonic seconds.
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
        return self._with({_XARGS: {**(own or {}), **hints}})

    def _with(self, added: Mapping[str, Any]) -> EngineRequest:
        return replace(self, fields={**self.fields, **added}, added={**self.added, **added})

    @cached_property
    def encoded(self) -> bytes:
        """The bytes that the engine gets.

        Raises:
            BadRequest: a number is none that JSON has.
        """
        if self.received is not None:
            return with_fields(self.received, self.added) if self.added else self.received
        try:
            return json.dumps(self.fields, allow_nan=False).encode()
        except ValueError:
            raise BadRequest("NaN and Infinity are no numbers of JSON") from None


def _check(path: str, fields: Mapping[str, Any]) -> None:
    _refuse_platform_fields(fields)
    check_numbers(fields, but=TEXTS)
    check_grammars(fields)
    if path == _RESPONSES:
        check_conversation(fields.get("input"))


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
