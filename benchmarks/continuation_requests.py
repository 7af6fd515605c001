"""Streams of many kinds, what a client gets of each, and in what two answers differ."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.load import WORDS

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MOST_LOGPROB_DIFFERENCE = 1e-3
_TIMEOUT_S = 900.0
# A word of the tokenizer's, with its space, is seldom more than a token and a quarter.
_TOKENS_A_WORD = 1.1
_NUMBERS = 24


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


# Kinds of requests

Make = Callable[[str, int, int], tuple[str, dict[str, Any]]]
"""From prompt, most tokens, and the request's number to path and body."""


def _chat(prompt: str, tokens: int, **more: Any) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    return CHAT, {**body, "temperature": 0, "ignore_eos": True, **more}


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
_TOOL = {"type": "function", "function": {"name": "add", "parameters": _SCHEMA}}


def _greedy(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(prompt, tokens)


def _seeded(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(prompt, tokens, temperature=0.9, top_p=0.95, seed=number)


def _two_seeded(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(prompt, tokens, temperature=0.9, seed=number, n=2)


def _penalties(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(
        prompt, tokens, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3
    )


def _min_tokens(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(prompt, tokens, ignore_eos=False, min_tokens=max(1, tokens - 20))


def _stop(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    # Greedy answers of a small model repeat themselves, and would stop at once.
    return _chat(prompt, tokens, temperature=0.9, seed=number)


def _schema(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA}}
    return _chat(prompt, tokens, ignore_eos=False, response_format=wanted)


def _tools(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    choice = {"type": "function", "function": {"name": "add"}}
    return _chat(prompt, tokens, ignore_eos=False, tools=[_TOOL], tool_choice=choice)


def _logprobs(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    return _chat(prompt, tokens, logprobs=True, top_logprobs=2)


def _completions(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return COMPLETIONS, {**body, "logprobs": 1}


def _responses(prompt: str, tokens: int, number: int) -> tuple[str, dict[str, Any]]:
    body = {"input": prompt, "max_output_tokens": tokens, "temperature": 0, "store": False}
    return RESPONSES, body


KINDS: dict[str, Make] = {
    "greedy": _greedy,
    "seeded": _seeded,
    "two_seeded": _two_seeded,
    "penalties": _penalties,
    "min_tokens": _min_tokens,
    "stop": _stop,
    "json_schema": _schema,
    "tools": _tools,
    "logprobs": _logprobs,
    "completions": _completions,
    "responses": _responses,
}


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
        path, body = KINDS[kind](prompt, tokens, number)
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


def new_session(key: str) -> aiohttp.ClientSession:
    """For a client that has this key of the platform's API."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        # A line of logprobs may be long.
        read_bufsize=2**20,
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S),
    )


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
