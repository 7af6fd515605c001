"""A client's request on its way to an engine: parsed, checked, completed, encoded.

The platform's own fields travel in it; a client that sets one is refused.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from loomserve.platform.base.errors import BadRequest, BodyTooLarge, ContextTooLong
from loomserve.platform.requests.client_body import (
    CHARACTERS_PER_TOKEN,
    TEXTS,
    TEXTS_ONLY,
    characters,
    conversations_in,
    read_body,
    texts_of,
    with_fields,
)
from loomserve.platform.requests.endpoints import ENDPOINTS, Endpoint
from loomserve.platform.requests.form_body import ClientForm
from loomserve.platform.requests.media import check_media
from loomserve.platform.requests.policy.conversation import check_conversation, check_messages
from loomserve.platform.requests.policy.fields import PLATFORMS_OWN, RESPONSES, check_values
from loomserve.platform.requests.policy.grammars import check_grammars
from loomserve.platform.requests.policy.logprobs import check_logprobs
from loomserve.platform.requests.policy.obeyed import (
    asking_nothing,
    check_form_obeyed,
    check_obeyed,
    thinking,
)
from loomserve.platform.requests.policy.sequences import (
    check_number,
    check_prompts,
    sequences,
    texts_to_compute,
)
from loomserve.platform.scheduling.policy.hints import BACKGROUND, DEADLINE, EXPECTED, Expected

FORWARDED = tuple(ENDPOINTS)
"""vLLM's endpoints that take one request and keep nothing between them, as clients name them."""

_XARGS = "vllm_xargs"
_HINTS = {
    DEADLINE: "set a deadline with the x-slo-ms header",
    BACKGROUND: "send work that may wait as a batch",
    EXPECTED: "lengths are predicted where models[].lengths says so; leave it out",
}
# vLLM's own bound.
_LONGEST_SALT = 1024


@dataclass(frozen=True)
class EngineRequest:
    """One request to one of vLLM's endpoints: a JSON object, or a form.

    Immutable: methods that add something return another request. The engine gets the client's bytes
    with additions at their end. The constructor checks nothing: it is for the platform's own
    requests.
    """

    path: str
    fields: Mapping[str, Any]
    """Without texts that were left as JSON."""
    received: bytes | None = field(default=None, repr=False)
    """The client's bytes; None: the request is the platform's own, or was parsed elsewhere."""
    texts: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    """Fields of a large body that were left as JSON."""
    added: Mapping[str, Any] = field(default_factory=dict)
    """Fields that the client's bytes do not have, or have otherwise."""
    form: ClientForm | None = field(default=None, repr=False)
    """The client's form; None: its body is JSON."""
    salt: str | None = None
    """Its cache salt, where vLLM's request has no field for it."""

    @classmethod
    def of(cls, path: str, body: bytes, content_type: bytes = b"") -> EngineRequest:
        """A client's request. Raises BadRequest if the body is no JSON object or form, or a
        field is the platform's own, too slow to compile or not obeyed; BodyTooLarge."""
        endpoint = ENDPOINTS[path]
        if endpoint.most_bytes is not None and len(body) > endpoint.most_bytes:
            raise BodyTooLarge(f"A request to {path} may have {endpoint.most_bytes} bytes.")
        if endpoint.is_form:
            form = ClientForm.of(body, content_type)
            _refuse_platform_fields(form.fields)
            check_form_obeyed(form.fields)
            return cls(path, form.fields, form=form)
        fields, texts = read_body(body)
        _check(path, fields, texts)
        return cls(path, fields, body, texts)._obeying()

    @classmethod
    def of_fields(cls, path: str, fields: Mapping[str, Any]) -> EngineRequest:
        """A client's request that was parsed elsewhere; raises BadRequest as :meth:`of`."""
        _check(path, fields, {})
        return cls(path, fields)._obeying()

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.path]

    @property
    def engine_path(self) -> str:
        return self.endpoint.at_engine

    @property
    def streams(self) -> bool:
        return self.endpoint.streams and bool(self.fields.get("stream"))

    @cached_property
    def sequences(self) -> int:
        """What counts in limits: answers at once, documents, or the request as one."""
        return sequences(self.endpoint, self.fields, self.texts)

    @cached_property
    def _prompts(self) -> int:
        return texts_to_compute(self.endpoint, self.fields, self.texts)

    def check_sequences(self, most: int) -> None:
        """Raises BadRequest for more than ``most`` sequences, more texts to embed than vLLM
        takes, or more log probabilities than others can wait for."""
        check_number(self.endpoint, self.fields, self.texts, most)
        check_logprobs(self.fields, self._prompts, repeats=self.path == RESPONSES)

    def check_conversation(self, media_hosts: Collection[str]) -> None:
        """Raises BadRequest if messages are wrong, too many, or link to media elsewhere."""
        # Other endpoints' inputs and prompts are texts and tokens.
        plain = TEXTS_ONLY if self.path == RESPONSES else {*TEXTS_ONLY, "input"}
        texts = {name: text for name, text in self.texts.items() if name not in plain}
        found = {**self.fields, **conversations_in(texts)}
        check_messages(self.path, found)
        if self.path == RESPONSES:
            check_conversation(found.get("input"))
        check_media(found, media_hosts)

    def check_texts(self, max_model_len: int | None) -> None:
        """Raises ContextTooLong if its texts are longer than any that fits the model's context."""
        # A form's texts are short, and its file is none.
        if max_model_len is None or self.form is not None:
            return
        most = max_model_len * CHARACTERS_PER_TOKEN
        # Most requests are small.
        if len(self.encoded) <= most:
            return
        found = {
            name: characters(text)
            for name, text in (self.texts or texts_of(self.encoded)).items()
            if name not in ("prompt_embeds", "images")
        }
        if (length := sum(found.values())) > most * self._prompts:
            raise ContextTooLong(
                f"This model's maximum context length is {max_model_len} tokens, and the request "
                f"has {length} characters of text, more than fit. Shorten it.",
                param=max(found, key=lambda name: found[name]),
            )

    def check_priority(self, first: int) -> None:
        """Raises BadRequest if its ``priority``, vLLM's field, is smaller (earlier) than this."""
        priority = self.fields.get("priority")
        if priority is not None and priority < first:
            raise BadRequest(
                f"priority is {priority}, and this key may ask for {first} or more (the smaller "
                "goes first); send a larger one, or ask the operator for first_priority",
                param="priority",
            )

    def for_model(self, model: str) -> EngineRequest:
        """The request with the model's own name in the place of an alias."""
        named = self.fields.get("model")
        return self if named is None or named == model else self._with({"model": model})

    def isolated(self, tenant: str) -> EngineRequest:
        """The request with a ``cache_salt`` (vLLM's field) that no other tenant's can have. A
        client's own salt still separates its requests. Requests without KV blocks stay as they are.
        Raises BadRequest if the client's salt is not valid."""
        if not self.endpoint.computes:
            return self
        own = self.fields.get("cache_salt")
        if own is not None and not (isinstance(own, str) and 0 < len(own) <= _LONGEST_SALT):
            raise BadRequest(
                f"cache_salt must be text of 1 to {_LONGEST_SALT} characters", param="cache_salt"
            )
        salt = hashlib.sha256(json.dumps([tenant, own]).encode()).hexdigest()
        return (
            self._with({"cache_salt": salt}) if self.endpoint.salted else replace(self, salt=salt)
        )

    def with_hints(
        self,
        *,
        deadline: float | None = None,
        expected: Expected | None = None,
        background: bool = False,
    ) -> EngineRequest:
        """The request with hints for the engine's scheduler; unchanged where vLLM has no place for
        them, or will refuse the client's ``vllm_xargs``. ``deadline`` of the whole answer is in
        monotonic seconds; ``background`` requests are served after all others."""
        hints: dict[str, Any] = {}
        if deadline is not None:
            hints[DEADLINE] = deadline
        if expected is not None:
            hints[EXPECTED] = [expected.tokens, expected.high]
        if background:
            hints[BACKGROUND] = 1
        own = self.fields.get(_XARGS)
        if not hints or not self.endpoint.hints or not isinstance(own, dict | None):
            return self
        return self._with({_XARGS: {**(own or {}), **hints}})

    def _obeying(self) -> EngineRequest:
        added = {**thinking(self.path, self.fields), **asking_nothing(self.path, self.fields)}
        return self._with(added) if added else self

    def _with(self, added: Mapping[str, Any]) -> EngineRequest:
        return replace(self, fields={**self.fields, **added}, added={**self.added, **added})

    @property
    def content_type(self) -> bytes:
        return b"application/json" if self.form is None else self.form.content_type

    @property
    def size(self) -> int:
        return len(self.encoded) if self.form is None else self.form.size(self.added)

    def pieces(self) -> Iterator[bytes]:
        """The bytes that the engine gets, of which no second copy is made."""
        return iter((self.encoded,)) if self.form is None else self.form.pieces(self.added)

    @cached_property
    def encoded(self) -> bytes:
        """The bytes that the engine gets, in one piece; raises BadRequest for NaN and Infinity."""
        if self.form is not None:
            return b"".join(self.pieces())
        if self.received is not None:
            return with_fields(self.received, self.added) if self.added else self.received
        try:
            return json.dumps(self.fields, allow_nan=False).encode()
        except ValueError:
            raise BadRequest("NaN and Infinity are no numbers of JSON") from None


def _check(path: str, fields: Mapping[str, Any], texts: Mapping[str, bytes]) -> None:
    _refuse_platform_fields(fields)
    check_obeyed(path, fields, texts)
    check_prompts(path, fields, texts)
    check_grammars(fields)
    check_values(path, fields, TEXTS)


def _refuse_platform_fields(fields: Mapping[str, Any]) -> None:
    given = fields.get(_XARGS)
    extra = given if isinstance(given, dict) else {}
    for name in PLATFORMS_OWN:
        if fields.get(name) is not None or extra.get(name) is not None:
            raise BadRequest(
                f"{name} is the platform's own channel to its engines; leave it out", param=name
            )
    for hint, instead in _HINTS.items():
        if hint in extra:
            raise BadRequest(f"{hint} is the platform's own; {instead}", param=hint)
