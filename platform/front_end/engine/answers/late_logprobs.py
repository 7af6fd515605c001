"""Many log probabilities of one answer, formed and written a slice at a time.

vLLM makes objects and JSON of all of them in one go, 10 to 28 µs each, on the event loop of all
streams. Here they are left out of its answer, and put into its JSON in slices, between which the
loop turns, as it does between a stream's chunks that have some. What a slice says is vLLM's.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, TypeAdapter
from vllm.entrypoints.generate.base.serving import clamp_prompt_logprobs
from vllm.logprobs import Logprob
from vllm.outputs import RequestOutput

from loomserve.platform.front_end.engine.answers.texts import LatePromptLogprobs

_SLICE = 1024
"""Log probabilities formed at once, and of which none are left for later."""
_PROMPT = "prompt_logprobs"
_positions: TypeAdapter[Any] = TypeAdapter(list[dict[int, Logprob] | None])

Part = Mapping[str, list[Any]]
"""Some entries of each list of an object in an answer."""
Parts = Iterator[Part]


@dataclass
class LateLogprobs:
    """What has been left out of the answer to a request that does not stream."""

    answers: int
    """To each prompt."""
    asked: int = 0
    """Prompts that engines have been asked."""
    prompts: dict[int, list[Any]] = field(default_factory=dict)
    """Those of prompts, by the prompt's place in the request."""
    choices: dict[int, Parts] = field(default_factory=dict)
    """Those of answers, by the answer's place."""
    _formed: int = 0

    def leave(self, given: Sequence[Any], parts: Callable[[Sequence[Any]], Parts]) -> bool:
        """Leave those of the next answer, of which ``parts`` makes what is written; False: there
        are few, and they are formed at once."""
        place, self._formed = self._formed, self._formed + 1
        of_prompt = self.prompts.get(place // self.answers, [])
        if of_prompt and given and given[0] is None:
            # It begins with its prompt.
            given = [*of_prompt, *given[len(of_prompt) :]]
        if entries(given) <= _SLICE:
            return False
        self.choices[place] = parts(given)
        return True


late_logprobs: ContextVar[LateLogprobs | None] = ContextVar("late_logprobs", default=None)
"""None: nobody writes what would be left."""


def entries(given: Sequence[Any]) -> int:
    """How many there are in the positions of a text."""
    return sum(len(each) for each in given if each)


def slices(given: Sequence[Any]) -> Iterator[slice]:
    """All positions of a text, as many at a time as have no more than a slice's."""
    widest = max(len(each) for each in given if each)
    step = max(1, _SLICE // widest)
    return (slice(at, at + step) for at in range(0, len(given), step))


async def with_turns(each: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    """The same, between which the event loop turns."""
    async with aclosing(each):
        async for one in each:
            yield one
            await asyncio.sleep(0)


async def with_logprobs(
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """The outputs of a request, between which the event loop turns, as between slices of its
    prompt's log probabilities."""
    late = late_logprobs.get()
    if late is not None:
        place, late.asked = late.asked, late.asked + 1
    async with aclosing(outputs):
        async for output in outputs:
            found = output.prompt_logprobs
            if isinstance(found, LatePromptLogprobs):
                await found.form(_SLICE)
            if late is not None and found and entries(found) > _SLICE:
                late.prompts[place] = found
                # As many as vLLM looks for.
                output.prompt_logprobs = [None] * len(found)
            yield output
            await asyncio.sleep(0)


async def written(answer: BaseModel, late: LateLogprobs | None) -> bytes:
    """An answer of vLLM's in JSON, with what has been left out of it."""
    told = answer.model_dump(mode="json", by_alias=True)
    left: dict[str, str] = {}
    if late is not None:
        choices = told.get("choices", ())
        for place, parts in late.choices.items():
            of_answer = choices[place].get("logprobs") if choices else None
            texts = _texts_with_some(told) if of_answer is None else [of_answer]
            await _put(parts, texts, left)
        for place, found in late.prompts.items() if choices else ():
            of = slice(place * late.answers, (place + 1) * late.answers)
            await _put(_of_prompt(found), [told] if _PROMPT in told else choices[of], left)
    text = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for mark, said in left.items():
        text = text.replace(f'"{mark}"', said)
    return text.encode()


def _texts_with_some(response: dict[str, Any]) -> list[dict[str, Any]]:
    """Texts of an answer of the Responses API that have log probabilities."""
    parts = [part for item in response.get("output", ()) for part in item.get("content") or ()]
    return [part for part in parts if part.get("logprobs") is not None]


def _of_prompt(found: Sequence[Any]) -> Parts:
    for some in slices(found):
        clamped = clamp_prompt_logprobs(found[some])
        yield {_PROMPT: _positions.dump_python(clamped)}


async def _put(parts: Parts, into: Sequence[dict[str, Any]], left: dict[str, str]) -> None:
    """Write the parts; objects of the answer get marks for them."""
    pieces: defaultdict[str, list[str]] = defaultdict(list)
    for part in parts:
        for name, some in part.items():
            said = json.dumps(some, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            pieces[name].append(said[1:-1])
        await asyncio.sleep(0)
    for name, of in pieces.items():
        left[mark := uuid.uuid4().hex] = f"[{','.join(of)}]"
        for each in into:
            each[name] = mark
