"""Load on an OpenAI server: streaming chat completions in closed and open loops.

The client shares a core with the servers it measures, so it does little a token: it reads the
connection's raw bytes, counts lines, and parses JSON once a request, for the usage.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import aiohttp

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
class Outcome:
    """One request; times in seconds on the loop's clock.

    ``due`` is when it should have been sent: in a closed loop when it was, in an open loop when the
    schedule said, so that a client that falls behind does not hide the server's queue.
    """

    due: float
    first: float = 0.0
    last: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0
    events: int = 0
    error: str | None = None
    cached_tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.first - self.due

    @property
    def tpot(self) -> float:
        return (self.last - self.first) / (self.output_tokens - 1)


class EventStream:
    """Reads server-sent events from chunks of bytes cut anywhere."""

    def __init__(self) -> None:
        self.events = 0
        self.first: float | None = None
        self.last = 0.0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.done = False
        self.failure: str | None = None
        self._rest = b""

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
        self.events += lines.count(b"\ndata:") + lines.startswith(b"data:")
        self.last = now
        if self.first is None and _CONTENT.search(lines):
            self.first = now
        if _ERROR.search(lines):
            self.failure = lines.decode(errors="replace").strip()[:300]
        if b'"completion_tokens"' in lines:
            self._read_usage(lines)
        if b"data: [DONE]" in lines or b"data:[DONE]" in lines:
            self.done = True

    def _read_usage(self, lines: bytes) -> None:
        for line in lines.splitlines():
            if line.startswith(b"data:") and b'"completion_tokens"' in line:
                usage = json.loads(line[5:])["usage"]
                self.prompt_tokens = usage["prompt_tokens"]
                self.output_tokens = usage["completion_tokens"]
                details = usage.get("prompt_tokens_details") or {}
                self.cached_tokens = details.get("cached_tokens") or 0

    def outcome(self, due: float, expected_tokens: int) -> Outcome:
        """What came of the request; anything but exactly ``expected_tokens`` is an error."""
        error = self.failure
        if error is None and not self.done:
            error = "the stream ended before [DONE]"
        if error is None and self.output_tokens != expected_tokens:
            error = f"{self.output_tokens} tokens came, {expected_tokens} were asked for"
        if error is None and self.first is None:
            error = "the stream held no text"
        return Outcome(
            due,
            self.first or 0.0,
            self.last,
            self.prompt_tokens,
            self.output_tokens,
            self.events,
            error,
            self.cached_tokens,
        )


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


def body(model: str, prompt: str, max_tokens: int) -> bytes:
    """A greedy streaming request that yields exactly ``max_tokens`` tokens."""
    return _greedy(model, max_tokens, messages=[{"role": "user", "content": prompt}])


def completion_body(model: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    """The same of a prompt's tokens, which no chat template changes."""
    return _greedy(model, max_tokens, prompt=list(prompt))


def _greedy(model: str, max_tokens: int, **asked: object) -> bytes:
    return json.dumps(
        {
            "model": model,
            **asked,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()


async def request(
    session: aiohttp.ClientSession, target: Target, prompt: str, max_tokens: int, due: float
) -> Outcome:
    """Send one chat request and read its stream to the end; failures come back in ``error``."""
    data = body(target.model, prompt, max_tokens)
    return await post(session, f"{target.url}/v1/chat/completions", data, max_tokens, due)


async def post(
    session: aiohttp.ClientSession, url: str, data: bytes, max_tokens: int, due: float
) -> Outcome:
    """Send a streaming request that yields ``max_tokens`` tokens, and read it to the end."""
    stream = EventStream()
    try:
        async with session.post(
            url,
            data=data,
            headers={"Content-Type": "application/json"},
        ) as response:
            if response.status != 200:
                text = await response.text()
                return Outcome(due, error=f"HTTP {response.status}: {text[:300]}")
            async for chunk in response.content.iter_any():
                stream.feed(chunk, time.perf_counter())
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return Outcome(due, error=f"{type(error).__name__}: {error}")
    return stream.outcome(due, max_tokens)


def new_session() -> aiohttp.ClientSession:
    # Servers close idle connections after 5 s; not reusing one that old avoids the race.
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),
        timeout=aiohttp.ClientTimeout(total=120),
    )


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

    def due_within(self) -> list[Outcome]:
        return [one for one in self.good if self.start <= one.due <= self.end]


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
    target: Target, *, streams: int, warmup: float, seconds: float, max_tokens: int, seed: str
) -> Window:
    """Keep ``streams`` requests open, each followed by the next at once.

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
            outcomes: list[Outcome] = []
            while (now := time.perf_counter()) < end:
                one = await request(session, target, next(source), max_tokens, now)
                unproven -= not outcomes
                outcomes.append(one)
                if one.error is not None:
                    end = 0.0
                elif unproven == 0 and end == math.inf:
                    end = max(time.perf_counter(), start + seconds)
            return outcomes

        per_stream = await asyncio.gather(*(stream(number) for number in range(streams)))
    return Window(start, end, tuple(itertools.chain.from_iterable(per_stream)))


async def open_loop(
    target: Target, *, rate: float, warmup: float, seconds: float, max_tokens: int, seed: str
) -> Window:
    """Send requests at Poisson times whether or not earlier ones have ended."""
    offsets = arrivals(seed, rate, warmup + seconds)
    texts: Sequence[str] = list(itertools.islice(prompts(seed), len(offsets)))
    begin = time.perf_counter()
    async with new_session() as session:

        async def at(offset: float, text: str) -> Outcome:
            due = begin + offset
            await asyncio.sleep(due - time.perf_counter())
            return await request(session, target, text, max_tokens, due)

        outcomes = await asyncio.gather(*map(at, offsets, texts))
    return Window(begin + warmup, begin + warmup + seconds, tuple(outcomes))
