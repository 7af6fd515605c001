"""Requests from production traces, or generated in their likeness.

A request is a list of prefix blocks, each named by a number; equal leading numbers are equal
tokens. Mooncake's conversations share prefixes; the requests of Azure's traces share none.

What is scaled to a small machine: a Mooncake trace's 512-token blocks become ``BLOCK_TOKENS``
tokens, and its output lengths shrink by the same factor; an Azure trace's prompts are divided by
``PROMPT_SCALE`` and its outputs, many of them a few tokens long, by ``OUTPUT_SCALE``. Arrivals are
stretched or compressed to the rate asked for.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import count, islice
from pathlib import Path
from typing import Any

from benchmarks.load import Request

BLOCK_TOKENS = 32
_TRACE_BLOCK_TOKENS = 512
_SCALE = _TRACE_BLOCK_TOKENS // BLOCK_TOKENS
# A block that so many conversations begin with is a system prompt, and does not tell them apart.
_COMMON_SHARE = 0.05
_VOCABULARY = (1000, 40000)
PROMPT_SCALE = 8
OUTPUT_SCALE = 4


@dataclass(frozen=True)
class PrefixRequest:
    """A prompt of ``tokens`` tokens in ``blocks``, sent ``at_s`` seconds after the load's begin."""

    at_s: float
    blocks: tuple[int, ...]
    tokens: int
    output_tokens: int

    def prompt(self, seed: str) -> list[int]:
        """Token ids; another seed gives other tokens for the same blocks."""
        ids: list[int] = []
        for block in self.blocks:
            source = random.Random(f"{seed}/{block}")
            ids += [source.randrange(*_VOCABULARY) for _ in range(BLOCK_TOKENS)]
        return ids[: self.tokens]

    def asked(self, model: str, seed: str, **more: Any) -> Request:
        """Of a model; ``more`` are fields of :class:`benchmarks.load.Request`."""
        prompt = self.prompt(seed)
        return Request.completion(model, prompt, self.output_tokens, at_s=self.at_s, **more)


def reuse(requests: Iterable[PrefixRequest]) -> float:
    """Share of all blocks that an endless cache would have had, from a cold start."""
    seen: set[int] = set()
    hits = total = 0
    for request in requests:
        known = next(
            (i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks)
        )
        hits += known
        total += len(request.blocks)
        seen.update(request.blocks)
    return hits / total if total else 0.0


def mooncake(
    path: Path, *, requests: int, rate: float, max_blocks: int, seed: str
) -> list[PrefixRequest]:
    """Whole conversations drawn from a trace until there are so many requests, in its order.

    A slice of the trace would hold one turn each of thousands of conversations, so conversations
    are thinned out instead, and time is compressed to ``rate`` requests a second.

    Raises:
        ValueError: the trace has too few conversations of at least two turns.
    """
    rows = list(trace_rows(path))
    common = {
        block
        for block, count in Counter(row["hash_ids"][0] for row in rows).items()
        if count > _COMMON_SHARE * len(rows)
    }
    conversations: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        own = [block for block in row["hash_ids"] if block not in common]
        if own and len(row["hash_ids"]) <= max_blocks:
            conversations[own[0]].append(row)
    several = [turns for turns in conversations.values() if len(turns) > 1]
    random.Random(seed).shuffle(several)
    chosen: list[dict[str, Any]] = []
    for turns in several:
        if len(chosen) < requests:
            chosen += turns
    if len(chosen) < requests:
        raise ValueError(f"{path} has only {len(chosen)} requests in conversations of several")
    chosen = sorted(chosen[:requests], key=lambda row: row["timestamp"])
    return [
        PrefixRequest(
            at_s=number / rate,
            blocks=tuple(row["hash_ids"]),
            tokens=max(1, int(row["input_length"]) // _SCALE),
            output_tokens=max(2, int(row["output_length"]) // _SCALE),
        )
        for number, row in enumerate(chosen)
    ]


def trace_rows(path: Path) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def conversations(
    *, requests: int, rate: float, max_blocks: int, seed: str, assistants: int = 3
) -> list[PrefixRequest]:
    """Conversations that grow turn by turn behind the system prompts of a few assistants.

    Popularity of assistants falls as 1/rank. Fitted to the Mooncake conversation trace where it
    has several turns: 3 turns a conversation and 6 new blocks a turn on average; ``max_blocks``
    bounds a prompt.
    """
    source = random.Random(seed)
    fresh = iter(range(10**9))
    systems = [[next(fresh) for _ in range(source.randint(4, 12))] for _ in range(assistants)]
    weights = [1 / (rank + 1) for rank in range(assistants)]
    open_: list[list[int]] = []
    found: list[PrefixRequest] = []
    at_s = 0.0
    while len(found) < requests:
        at_s += source.expovariate(rate)
        if open_ and source.random() < 2 / 3:
            history = open_.pop(source.randrange(len(open_)))
        else:
            history = list(source.choices(systems, weights)[0])
        blocks = history + [next(fresh) for _ in range(1 + int(source.expovariate(1 / 6)))]
        if len(blocks) > max_blocks:
            continue
        open_.append(blocks)
        found.append(
            PrefixRequest(
                at_s,
                tuple(blocks),
                len(blocks) * BLOCK_TOKENS - source.randrange(16),
                2 + int(source.expovariate(1 / 20)),
            )
        )
    return found


def documents(
    *, documents: int, rounds: int, tokens: tuple[int, int], output_tokens: int, seed: str
) -> list[list[PrefixRequest]]:
    """Rounds in which each document is asked about once, in another order each and each time with
    another question, of a block. Lengths of documents are even between the bounds in whole blocks.
    """
    source = random.Random(seed)
    fresh = count()
    least, most = (of // BLOCK_TOKENS for of in tokens)
    texts = [tuple(islice(fresh, source.randint(least, most))) for _ in range(documents)]
    found = []
    for _ in range(rounds):
        order = source.sample(texts, len(texts))
        asked = [(*text, next(fresh)) for text in order]
        found.append(
            [PrefixRequest(0.0, of, len(of) * BLOCK_TOKENS, output_tokens) for of in asked]
        )
    return found


@dataclass(frozen=True)
class Arrival:
    """A request of a trace: seconds after the trace's first, and lengths in tokens."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Likeness:
    """Poisson arrivals a second; mean and deviation of the logarithms of log-normal lengths."""

    rate: float
    prompt: tuple[float, float]
    output: tuple[float, float]


AZURE_LIKE = {
    "conversation": Likeness(5.9, (6.65, 0.99), (4.96, 0.87)),
    "code": Likeness(3.1, (7.0, 1.35), (2.78, 0.84)),
}
"""Fitted to the Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024), in which
the lengths of prompt and output do not correlate. The code trace's bursts are not modelled."""


def azure(path: Path) -> list[Arrival]:
    """An Azure LLM inference trace of 2023: gzipped CSV of TIMESTAMP, ContextTokens and
    GeneratedTokens."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    times = [datetime.fromisoformat(row["TIMESTAMP"]) for row in rows]
    return [
        Arrival(
            at_s=(at - times[0]).total_seconds(),
            prompt_tokens=int(row["ContextTokens"]),
            output_tokens=int(row["GeneratedTokens"]),
        )
        for at, row in zip(times, rows, strict=True)
    ]


def azure_like(kind: str, *, requests: int, seed: str) -> list[Arrival]:
    """A trace generated by one of ``AZURE_LIKE``."""
    source, likeness = random.Random(f"{kind}/{seed}"), AZURE_LIKE[kind]
    at_s = 0.0
    found: list[Arrival] = []
    for _ in range(requests):
        found.append(
            Arrival(
                at_s,
                1 + int(source.lognormvariate(*likeness.prompt)),
                1 + int(source.lognormvariate(*likeness.output)),
            )
        )
        at_s += source.expovariate(likeness.rate)
    return found


def scaled_down(
    arrivals: Iterable[Arrival],
    context: int,
    *,
    prompt_scale: int = PROMPT_SCALE,
    output_scale: int = OUTPUT_SCALE,
) -> list[Arrival]:
    """With lengths that a small machine can serve; what exceeds ``context`` tokens is left out.

    An output keeps at least two tokens, so that there is a time between tokens.
    """
    scaled = (
        Arrival(
            one.at_s,
            max(1, one.prompt_tokens // prompt_scale),
            max(2, one.output_tokens // output_scale),
        )
        for one in arrivals
    )
    return [one for one in scaled if one.prompt_tokens + one.output_tokens <= context]


def brief_conversations(trace: Path | None, context: int, *, requests: int) -> list[Arrival]:
    """The Azure conversation trace, or so many requests like its own, with prompts divided by 24
    and outputs by 2: for engines that compute a prompt's token in an eighth of a decode step, and
    have ``context`` tokens with a block to spare."""
    whole = azure(trace) if trace else azure_like("conversation", requests=requests, seed="t")
    return scaled_down(whole, context - BLOCK_TOKENS, prompt_scale=24, output_scale=2)


def window(
    arrivals: Sequence[Arrival], *, requests: int, rate: float, seed: str
) -> list[PrefixRequest]:
    """So many consecutive requests from a random place, which share nothing, at so many a second.

    All times between arrivals are stretched by one factor, so that bursts stay bursts.

    Raises:
        ValueError: the trace has too few requests, or all of them arrive at once.
    """
    if not 2 <= requests <= len(arrivals):
        raise ValueError(f"{requests} of {len(arrivals)} requests make no window")
    start = random.Random(seed).randrange(len(arrivals) - requests + 1)
    chosen = arrivals[start : start + requests]
    span = chosen[-1].at_s - chosen[0].at_s
    if span <= 0:
        raise ValueError(f"{requests} requests arrive at once, so that they have no rate")
    stretch = (requests - 1) / rate / span
    fresh = count()
    return [
        PrefixRequest(
            at_s=(one.at_s - chosen[0].at_s) * stretch,
            blocks=tuple(islice(fresh, -(-one.prompt_tokens // BLOCK_TOKENS))),
            tokens=one.prompt_tokens,
            output_tokens=one.output_tokens,
        )
        for one in chosen
    ]
