"""Reads OpenAI's requests for static batches, and writes OpenAI's answers."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from transformers import AutoTokenizer

from loomserve.platform.base.errors import BadRequest, ContextTooLong
from loomserve.platform.batch.offline.executor import OfflineExecutor, OfflineRequest
from loomserve.platform.batch.offline.worker import OfflineAnswer, OfflineLine

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class _Request(BaseModel):
    """Fields of both endpoints' requests; any other field is refused, not ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    n: Literal[1] | None = None
    ignore_eos: bool = False
    stream: Literal[False] | None = None
    user: str | None = None


class _Text(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[_Text]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        return {"role": self.role, "content": text, **({"name": self.name} if self.name else {})}


class _Chat(_Request):
    messages: list[_Message] = Field(min_length=1)
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class _Completion(_Request):
    prompt: str | list[int]


class OfflineLines:
    """Reader and writer of a model's lines; only one thread at a time may use its tokenizer."""

    def __init__(self, source: str, executor: OfflineExecutor, revision: str | None = None) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(source, revision=revision)
        self._executor = executor

    def read(self, line: OfflineLine) -> OfflineRequest:
        """Raises BadRequest, which says why, if the request cannot be answered by this model."""
        asked = _parsed(line)
        try:
            prompt = self._prompt(asked)
        except BadRequest:
            raise
        except Exception as error:  # the model's own template may raise anything
            raise BadRequest(f"the model's chat template refuses this: {error}") from None
        most = self._executor.context - len(prompt)
        limit = asked.max_tokens
        if isinstance(asked, _Chat):
            limit = asked.max_completion_tokens or limit
        if not prompt or most < (limit or 1):
            raise ContextTooLong(
                f"{len(prompt)} tokens of prompt and {limit or 1} of answer do not fit the model's "
                f"context of {self._executor.context}, or there is no prompt: shorten either",
                param="messages" if isinstance(asked, _Chat) else "prompt",
            )
        return OfflineRequest(
            prompt=prompt,
            max_tokens=limit or most,
            ignore_eos=asked.ignore_eos,
            temperature=asked.temperature,
            top_p=asked.top_p,
            seed=asked.seed,
        )

    def run(
        self, requests: Sequence[OfflineRequest], left: Callable[[], Collection[int]]
    ) -> list[list[int]]:
        """See :meth:`OfflineExecutor.run`; needs no tokenizer."""
        return self._executor.run(requests, left)

    def answer(
        self, line: OfflineLine, request: OfflineRequest, tokens: Sequence[int]
    ) -> OfflineAnswer:
        ended = not request.ignore_eos and bool(tokens) and tokens[-1] in self._executor.end_tokens
        text = self._tokenizer.decode(tokens, skip_special_tokens=True)
        chat = line.path == CHAT
        said = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice = {
            "index": 0,
            **said,
            "logprobs": None,
            "finish_reason": "stop" if ended else "length",
        }
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": line.body["model"],
            "choices": [choice],
            "usage": {
                "prompt_tokens": len(request.prompt),
                "completion_tokens": len(tokens),
                "total_tokens": len(request.prompt) + len(tokens),
            },
        }
        return OfflineAnswer(json.dumps(body).encode(), len(tokens))

    def _prompt(self, asked: _Chat | _Completion) -> list[int]:
        if isinstance(asked, _Chat):
            if not self._tokenizer.chat_template:
                raise BadRequest(
                    f"the model has no chat template: send its lines to {COMPLETIONS}",
                    param="messages",
                )
            messages = [message.plain() for message in asked.messages]
            text = self._tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=False
            )
            # The template has written the special tokens.
            tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
            return tokens
        if isinstance(asked.prompt, str):
            tokens = self._tokenizer.encode(asked.prompt)
            return tokens
        known = len(self._tokenizer)
        if not all(0 <= token < known for token in asked.prompt):
            raise BadRequest(f"a token id is not one of 0 to {known - 1}", param="prompt")
        return asked.prompt


def _parsed(line: OfflineLine) -> _Chat | _Completion:
    kinds: Mapping[str, type[_Chat | _Completion]] = {CHAT: _Chat, COMPLETIONS: _Completion}
    kind = kinds.get(line.path)
    if kind is None:
        raise BadRequest(f"the model {line.body['model']!r} does not answer {line.path}")
    try:
        return kind.model_validate(line.body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(str(part) for part in problem["loc"])
        message = f"{place}: {problem['msg']}"
        if problem["type"] == "extra_forbidden":
            message = f"{place!r} is not known to models that answer batches only; leave it out"
        raise BadRequest(message, param=place or None) from None
