"""Load on an OpenAI server: streaming requests, each sent when it is due or one after another.

The client shares a core with the servers it measures, so it does little a token: it reads the
connection's raw bytes, counts lines, and parses JSON once a request, for the usage and, where they
are asked for, the tokens' ids.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.harness import NotMeasuredError, percentiles

# Everyday words, most of them one token in a common tokenizer.
_TEXT = """
river mountain window garden winter summer letter market doctor teacher village kitchen bridge
engine island forest picture mirror animal planet silver golden paper water music story history
science number center corner shadow morning evening money power energy travel answer question
reason season nation family friend person country city street school office company machine
model system method theory practice language culture art color light sound voice heart mind body
hand table chair door wall floor road field tree flower bird horse ship train plane boat fire
stone metal glass
"""
WORDS = tuple(_TEXT.split())

# Chat completions carry "content", completions "text".
_CONTENT = re.compile(rb'"(?:content|text)":\s*"(?!")')
_ERROR = re.compile(rb'^data:\s*\{"error"', re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """Where to send requests: ``url`` without the path, such as ``http://127.0.0.1:8000``."""

    url: str
    model: str


@dataclass(frozen=True)
class Request:
    """A greedy streaming request.

    Attributes:
        tokens: of its answer, exactly; None: it ends by itself.
        at_s: when it is due, seconds after the load's begin.
        slo_s: within how many seconds after that its client wants the whole answer, if it says so.
        ids: whether the answer's token ids are wanted.
    """

    path: str
    body: dict[str, Any]
    tokens: int | None
    at_s: float = 0.0
    slo_s: float | None = None
    ids: bool = False

    @classmethod
    def chat(cls, model: str, messages: list[Any], tokens: int, **more: Any) -> Request:
        body = _greedy(model, tokens) | {"messages": messages}
        return cls("/v1/chat/completions", body, tokens, **more)

    @classmethod
    def completion(cls, model: str, prompt: Sequence[int], tokens: int, **more: Any) -> Request:
        """Of a prompt's tokens, which no chat template changes."""
        body = _greedy(model, tokens) | {"prompt": list(prompt)}
        return cls("/v1/completions", body, tokens, **more)

    def data(self) -> bytes:
        return json.dumps(self.body | ({"return_token_ids": True} if self.ids else {})).encode()


def _greedy(model: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True)
class Outcome:
    """One request; times in seconds on ``time.perf_counter``'s clock.

    ``due`` is when it should have been sent: in a closed loop when it was, in an open loop when the
    schedule said, so that a client that falls behind does not hide the server's queue.

    Attributes:
        first: when its first text came.
        last: when its stream ended.
        times: when the events of a completion's tokens came; of each token, if it has their ids.
        ids: of its tokens, if they were wanted.
    """

    due: float
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    error: str | None = None
    cached_tokens: int = 0
    times: tuple[float, ...] = ()
    ids: tuple[int, ...] = ()

    @property
    def ttft(self) -> float:
        return (self.times[0] if self.times else self.first) - self.due

    @property
    def tpot(self) -> float:
        times = self.times or (self.first, self.last)
        return (times[-1] - times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Between the events of its tokens, seconds."""
        return [after - before for before, after in itertools.pairwise(self.times)]


@dataclass
class EventStream:
    """Reads server-sent events from chunks of bytes cut anywhere.

    Attributes:
        ids: whether token ids are kept.
        completion: whether all events are tokens' but the last two, the usage and [DONE].
    """

    ids: bool = False
    completion: bool = False
    first: float | None = None
    times: list[float] = field(default_factory=list)
    done: bool = False
    failure: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    _rest: bytes = b""
    _kept: bytes = b""

    def feed(self, chunk: bytes, now: float) -> None:
        """Take the next bytes, received at ``now``.

        The first token is the first non-empty content: an early chunk that holds only the role
        does not count. Lines are looked at when complete; JSON strings hold no raw line feeds, so
        a model that writes ``data:`` is not counted.
        """
        data = self._rest + chunk
        end = data.rfind(b"\n") + 1
        lines, self._rest = data[:end], data[end:]
        if not lines:
            return
        self.times += [now] * (lines.count(b"\ndata:") + lines.startswith(b"data:"))
        if self.ids:
            self._kept += lines
        if self.first is None and _CONTENT.search(lines):
            self.first = now
        if _ERROR.search(lines):
            self.failure = lines.decode(errors="replace").strip()[:300]
        if b'"completion_tokens"' in lines:
            for event in _events(lines):
                self.usage = event.get("usage") or self.usage
        if b"data: [DONE]" in lines or b"data:[DONE]" in lines:
            self.done = True

    def outcome(self, due: float, tokens: int | None) -> Outcome:
        """What came of the request; where ``tokens`` are wanted, any other number is an error."""
        output = self.usage.get("completion_tokens", 0)
        error = self.failure
        if error is None and not self.done:
            error = "the stream ended before [DONE]"
        if error is None and tokens is not None and output != tokens:
            error = f"{output} tokens came, {tokens} were asked for"
        if error is None and self.first is None and not (self.completion or self.ids):
            error = "the stream held no text"
        times, ids = self.times[:-2] if self.completion else [], list[int]()
        if self.ids:
            by_event = [_ids(event) for event in _events(self._kept)]
            times = [at for at, of in zip(self.times, by_event, strict=False) for _ in of]
            ids = [one for of in by_event for one in of]
        details = self.usage.get("prompt_tokens_details") or {}
        return Outcome(
            due=due,
            first=self.first or 0.0,
            last=self.times[-1] if self.times else 0.0,
            prompt_tokens=self.usage.get("prompt_tokens", 0),
            output_tokens=output,
            events=len(self.times),
            error=error,
            cached_tokens=details.get("cached_tokens") or 0,
            times=tuple(times),
            ids=tuple(ids),
        )


def _events(lines: bytes) -> Iterator[dict[str, Any]]:
    for line in lines.splitlines():
        if line.startswith(b"data:") and (said := line[5:].strip()) != b"[DONE]":
            yield json.loads(said)


def _ids(event: dict[str, Any]) -> list[int]:
    return [one for choice in event.get("choices") or () for one in choice.get("token_ids") or ()]


def prompts(seed: str, words: tuple[int, int] = (10, 55)) -> Iterator[str]:
    """Endless prompts, the same for the same seed and all different from the first word on.

    ``words`` bounds their lengths; with a chat template the default is about 50 to 100 tokens.
    """
    source = random.Random(seed)
    for number in itertools.count():
        length = source.randint(*words)
        # The number leads, so that no two prompts share a prefix that a cache could serve.
        yield f"{source.randrange(10**6)}-{number}: " + " ".join(source.choices(WORDS, k=length))


def arrivals(seed: str, rate: float, duration: float) -> list[float]:
    """Poisson arrivals: offsets in seconds below ``duration`` at ``rate`` a second."""
    source = random.Random(seed)
    times = []
    now = source.expovariate(rate)
    while now < duration:
        times.append(now)
        now += source.expovariate(rate)
    return times


# Sending


def new_session(key: str = "-", timeout_s: float = 1200.0) -> aiohttp.ClientSession:
    """For a client that has this key of the platform's API."""
    return aiohttp.ClientSession(
        headers={"Authorization": f"Bearer {key}"},
        # A line of logprobs may be long.
        read_bufsize=2**20,
        # Servers close idle connections after 5 s; not reusing one that old avoids the race.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=timeout_s),
    )


async def send(session: aiohttp.ClientSession, url: str, request: Request, due: float) -> Outcome:
    """Send a request and read its stream to the end; failures come back in ``error``."""
    stream = EventStream(request.ids, completion="chat" not in request.path)
    headers = {"Content-Type": "application/json"}
    if request.slo_s is not None:
        left_s = request.slo_s - (time.perf_counter() - due)
        headers["x-slo-ms"] = str(max(1, round(1000 * left_s)))
    try:
        async with session.post(url + request.path, data=request.data(), headers=headers) as answer:
            if answer.status != 200:
                return Outcome(due, error=f"HTTP {answer.status}: {(await answer.text())[:300]}")
            async for chunk in answer.content.iter_any():
                stream.feed(chunk, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Outcome(due, error=f"{type(error).__name__}: {error}")
    return stream.outcome(due, request.tokens)


async def send_when_due(
    urls: Sequence[str], requests: Sequence[Request], key: str = "-"
) -> list[Outcome]:
    """Send every request when it is due, to the URLs in turn, whether or not others have ended."""
    begin = time.perf_counter()
    async with new_session(key) as session:

        async def one(place: int, request: Request) -> Outcome:
            due = begin + request.at_s
            await asyncio.sleep(due - time.perf_counter())
            return await send(session, urls[place % len(urls)], request, due)

        return await asyncio.gather(*map(one, itertools.count(), requests))


async def send_in_streams(
    urls: Sequence[str], requests: Sequence[Request], streams: int, key: str = "-"
) -> list[Outcome]:
    """Send all requests in their order, so many at once, each stream to one of the URLs."""
    waiting = iter(enumerate(requests))
    found: dict[int, Outcome] = {}
    async with new_session(key) as session:

        async def stream(number: int) -> None:
            for place, request in waiting:
                now = time.perf_counter()
                found[place] = await send(session, urls[number % len(urls)], request, now)

        await asyncio.gather(*map(stream, range(streams)))
    return [found[place] for place in range(len(requests))]


# Windows of an endless load


@dataclass(frozen=True)
class Window:
    """The measured part of a load, and every request that was sent; seconds."""

    start: float
    end: float
    outcomes: tuple[Outcome, ...]

    @property
    def errors(self) -> list[str]:
        return [outcome.error for outcome in self.outcomes if outcome.error is not None]

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    def tokens_per_second(self) -> float:
        """Output tokens earned within the window, over its length; see :func:`tokens_within`."""
        return tokens_within(self.good, self.start, self.end) / (self.end - self.start)

    def ended_within(self) -> list[Outcome]:
        return [one for one in self.good if self.start <= one.last <= self.end]

    def figures(self) -> dict[str, Any]:
        """Of the requests that ended within: those that ended later ran beside fewer others.

        Raises:
            NotMeasuredError: none did.
        """
        if not (ended := self.ended_within()):
            raise NotMeasuredError("no request ended within the window: measure longer (--seconds)")
        return {
            "tokens_per_second": self.tokens_per_second(),
            **percentiles("ttft_ms", [1000 * one.ttft for one in ended]),
            **percentiles("tpot_ms", [1000 * one.tpot for one in ended]),
            "requests": len(ended),
            "tokens_per_event": statistics.fmean(one.output_tokens / one.events for one in ended),
        }


def tokens_within(outcomes: Iterable[Outcome], start: float, end: float) -> float:
    """Tokens earned between two times, each request's spread evenly over its time from due to last.

    Counting only requests that ended would move a short window's result by a whole request, leaving
    out the waits for first tokens would move it by how many of them it happens to hold, and
    counting chunks would favour the server that cuts its tokens into more of them.
    """
    total = 0.0
    for one in outcomes:
        inside = max(0.0, min(one.last, end) - max(one.due, start))
        total += one.output_tokens * inside / (one.last - one.due)
    return total


async def closed_loop(
    *targets: Target, streams: int, warmup: float, seconds: float, max_tokens: int, seed: str
) -> Window:
    """Keep ``streams`` requests open, divided evenly over the targets, each followed by the next at
    once.

    Streams start spread over ``warmup`` seconds, so that their prefills do not come together; then
    the window opens. It closes after ``seconds``, or later, when each stream has ended its first
    request, so that it holds whole requests however slow the server is. Every stream keeps the
    load up until then and finishes its last request. A failed request ends the load, as its
    numbers are void.
    """
    source = prompts(seed)
    begin = time.perf_counter()
    start, end = begin + warmup, math.inf
    unproven = streams
    async with new_session() as session:

        async def stream(number: int) -> list[Outcome]:
            nonlocal end, unproven
            await asyncio.sleep(warmup * number / streams)
            target = targets[number % len(targets)]
            outcomes: list[Outcome] = []
            while (now := time.perf_counter()) < end:
                messages = [{"role": "user", "content": next(source)}]
                request = Request.chat(target.model, messages, max_tokens)
                one = await send(session, target.url, request, now)
                unproven -= not outcomes
                outcomes.append(one)
                if one.error is not None:
                    end = 0.0
                elif unproven == 0 and end == math.inf:
                    end = max(time.perf_counter(), start + seconds)
            return outcomes

        per_stream = await asyncio.gather(*(stream(number) for number in range(streams)))
    return Window(start, end, tuple(itertools.chain.from_iterable(per_stream)))
