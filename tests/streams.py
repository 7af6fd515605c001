"""Streams of many kinds, what a client gets of each, and in what two answers differ."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.load import WORDS, new_session

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MOST_LOGPROB_DIFFERENCE = 1e-3
# A word of the tokenizer's, with its space, is seldom more than a token and a quarter.
_TOKENS_A_WORD = 1.1
_NUMBERS = 24
_LOOK_S = 0.005


@dataclass(frozen=True)
class Asked:
    """A streaming request. ``kind`` is a key of :data:`KINDS`."""

    kind: str
    path: str
    body: Mapping[str, Any]

    def salted(self, salt: str) -> Asked:
        """The same, which shares no cached block with requests of other salts."""
        return Asked(self.kind, self.path, {**self.body, "cache_salt": salt})


@dataclass
class Choice:
    """One answer of a request, as it came; times on ``time.perf_counter``'s clock."""

    text: str = ""
    arguments: str = ""
    """Of tool calls."""
    finish: str | None = None
    logprobs: list[tuple[str, float]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When its pieces came."""

    @property
    def gaps(self) -> list[tuple[float, float]]:
        return list(zip(self.times, self.times[1:], strict=False))


@dataclass
class Answer:
    asked: Asked
    sent: float
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    """Tokens of the prompt and of all answers."""
    done: bool = False
    error: str | None = None

    def choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    @property
    def pieces(self) -> int:
        """Of the answer that has fewest."""
        return min((len(one.times) for one in self.choices.values()), default=0)

    @property
    def lost(self) -> str | None:
        """Why the client has no whole answer; None: it has."""
        if self.error is None and not self.done:
            return "the stream ended before its end was said"
        return self.error


def difference(one: Answer, other: Answer) -> str | None:
    """In what two whole answers to one request differ; None: in nothing a client sees."""
    if one.usage != other.usage:
        return f"usage {one.usage} and {other.usage}"
    if one.choices.keys() != other.choices.keys():
        return f"choices {sorted(one.choices)} and {sorted(other.choices)}"
    for index, a in one.choices.items():
        b = other.choices[index]
        for name in ("text", "arguments", "finish"):
            mine, its = getattr(a, name), getattr(b, name)
            if mine != its:
                return f"{name} of choice {index}: {_parting(str(mine), str(its))}"
        if [token for token, _ in a.logprobs] != [token for token, _ in b.logprobs]:
            return f"tokens of the logprobs of choice {index}"
        apart = [abs(x - y) for (_, x), (_, y) in zip(a.logprobs, b.logprobs, strict=True)]
        if max(apart, default=0.0) > MOST_LOGPROB_DIFFERENCE:
            return f"logprobs of choice {index} by {max(apart):.2g}"
    return None


def _parting(one: str, other: str) -> str:
    at = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    return f"from character {at} of {len(one)}, {one[at : at + 20]!r} and {other[at : at + 20]!r}"


def differences(one: Sequence[Answer], other: Sequence[Answer]) -> dict[int, str]:
    """By the request's number, of those that are whole."""
    pairs = enumerate(zip(one, other, strict=True))
    return {
        number: f"{a.asked.kind}: {found}"
        for number, (a, b) in pairs
        if not b.lost and (found := difference(a, b))
    }


# Kinds of requests

_SCHEMA = {
    "type": "object",
    "properties": {
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 9999},
            "minItems": _NUMBERS,
            "maxItems": _NUMBERS,
        }
    },
    "required": ["numbers"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": _SCHEMA}}
_SEEDED = {"temperature": 0.9}
"""Beside a seed of the request's own."""

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {**_SEEDED, "top_p": 0.95},
    "two_seeded": {**_SEEDED, "n": 2},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "min_tokens": {"ignore_eos": False},
    # Greedy answers of a small model repeat themselves, and would stop at once.
    "stop": _SEEDED,
    "json_schema": {"ignore_eos": False, "response_format": _FORMAT},
    "tools": {
        "ignore_eos": False,
        "tools": [_TOOL],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    },
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "completions": {"logprobs": 1},
    "responses": {"store": False},
}
"""What each kind asks for beside a greedy answer that does not end by itself."""


def _request(kind: str, prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    """Path and body of a request of most so many tokens; its number is its seed."""
    more = KINDS[kind]
    if kind == "responses":
        return RESPONSES, {"input": prompt, "max_output_tokens": tokens, "temperature": 0, **more}
    body = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    if "temperature" in more:
        body["seed"] = number
    if kind == "min_tokens":
        body["min_tokens"] = max(1, tokens - 20)
    if kind == "completions":
        return COMPLETIONS, {"prompt": prompt, **body}
    return CHAT, {"messages": [{"role": "user", "content": prompt}], **body}


def mixture(model: str, count: int, tokens: int, context: int, seed: int) -> list[Asked]:
    """``count`` requests, the kinds in turn, each with about ``context`` tokens of its own first.

    Answers have ``tokens`` tokens at most.
    """
    source = random.Random(f"{seed} {context}")
    names = list(KINDS)
    asked = []
    for number in range(count):
        kind = names[number % len(names)]
        words = source.choices(WORDS, k=round(context / _TOKENS_A_WORD)) if context else []
        prompt = f"{number}: {' '.join(words)}\nTell a long story of the {source.choice(WORDS)}."
        path, body = _request(kind, prompt, tokens, number)
        body |= {"model": model, "stream": True}
        if path != RESPONSES:
            body["stream_options"] = {"include_usage": True}
        asked.append(Asked(kind, path, body))
    return asked


def with_stop_strings(asked: Sequence[Asked], answers: Sequence[Answer]) -> list[Asked]:
    """Those of the kind ``stop`` get a stop string that comes late in their answer without one."""
    made = []
    for one, answer in zip(asked, answers, strict=True):
        if one.kind == "stop":
            one = Asked(one.kind, one.path, {**one.body, "stop": [_late(answer.choice(0).text)]})
        made.append(one)
    return made


def _late(text: str) -> str:
    """A string that comes late in a text, for the first time."""
    length = 12
    firsts = (at for at in range(9 * len(text) // 10) if text.find(text[at : at + length]) == at)
    at = max(firsts, default=0)
    return text[at : at + length]


# What comes


async def stream(session: aiohttp.ClientSession, url: str, answer: Answer) -> None:
    """Send a request, and read its stream into ``answer`` to the end; it raises nothing."""
    try:
        async with session.post(url + answer.asked.path, json=answer.asked.body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return
            async for line in response.content:
                if line.startswith(b"data:"):
                    _read(answer, line[5:].strip(), time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"


def _read(answer: Answer, data: bytes, now: float) -> None:
    if data == b"[DONE]":
        answer.done = True
        return
    event = json.loads(data)
    if event.get("error"):
        answer.error = str(event["error"])[:300]
    elif "type" in event:
        _read_response(answer, event, now)
    else:
        for one in event.get("choices", ()):
            _read_choice(answer.choice(one["index"]), one, now)
        if event.get("usage"):
            _read_usage(answer, event["usage"], "prompt_tokens", "completion_tokens")


def _read_choice(choice: Choice, said: Mapping[str, Any], now: float) -> None:
    delta = said.get("delta") or {}
    text = (delta.get("content") or "") + (said.get("text") or "")
    calls = delta.get("tool_calls") or ()
    arguments = "".join((each.get("function") or {}).get("arguments") or "" for each in calls)
    choice.text += text
    choice.arguments += arguments
    choice.finish = said.get("finish_reason") or choice.finish
    logprobs = said.get("logprobs") or {}
    for token in logprobs.get("content") or ():
        choice.logprobs.append((token["token"], token["logprob"]))
        choice.logprobs += [("", top["logprob"]) for top in token.get("top_logprobs") or ()]
    choice.logprobs += zip(
        logprobs.get("tokens") or (), logprobs.get("token_logprobs") or (), strict=True
    )
    if text or arguments or logprobs:
        choice.times.append(now)


def _read_response(answer: Answer, event: Mapping[str, Any], now: float) -> None:
    choice = answer.choice(0)
    match event["type"]:
        case "response.output_text.delta":
            choice.text += event["delta"]
            choice.times.append(now)
        case "response.completed" | "response.incomplete":
            response = event["response"]
            choice.finish = str(response.get("incomplete_details") or response["status"])
            answer.done = True
            if response.get("usage"):
                _read_usage(answer, response["usage"], "input_tokens", "output_tokens")
        case "response.failed" | "error":
            answer.error = json.dumps(event)[:300]


def _read_usage(answer: Answer, usage: Mapping[str, Any], prompt: str, output: str) -> None:
    answer.usage = usage[prompt], usage[output]


@dataclass
class Load:
    """Requests that run at once."""

    answers: list[Answer] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, url: str, asked: Sequence[Asked], key: str = "-") -> None:
        """Send them all, and return when all have ended, however they did.

        Args:
            url: of the platform.
            asked: gets a cache salt of this run.
            key: of the platform's API.
        """
        salt = uuid.uuid4().hex
        async with new_session(key) as session:
            now = time.perf_counter()
            self.answers = [Answer(one.salted(salt), now) for one in asked]
            await asyncio.gather(*(stream(session, url, one) for one in self.answers))
        self.ended.set()

    async def reached(self, tokens: int) -> None:
        """Return once half of the streams have so many pieces, or all have ended."""
        while not self.ended.is_set():
            if self.half_have(tokens):
                return
            await asyncio.sleep(_LOOK_S)

    def half_have(self, tokens: int) -> bool:
        """Whether half of the streams have so many pieces."""
        return 2 * sum(one.pieces >= tokens for one in self.answers) > len(self.answers)
