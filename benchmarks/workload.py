"""Requests with shared prefixes: from a Mooncake trace, or generated in its likeness.

A request is a list of prefix blocks, each named by a number; equal leading numbers are equal
tokens. What is scaled to a small machine: a trace's 512-token blocks become ``BLOCK_TOKENS``
tokens, its output lengths shrink by the same factor, and its arrivals are compressed to the rate
asked for.
"""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BLOCK_TOKENS = 32
_TRACE_BLOCK_TOKENS = 512
_SCALE = _TRACE_BLOCK_TOKENS // BLOCK_TOKENS
# A block that so many conversations begin with is a system prompt, and does not tell them apart.
_COMMON_SHARE = 0.05
_VOCABULARY = (1000, 40000)


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
    rows = list(_rows(path))
    common = {
        block
        for block, count in Counter(row["hash_ids"][0] for row in rows).items()
        if count > _COMMON_SHARE * len(rows)
    }
    conversations: dict[int, list[dict[str, list[int]]]] = defaultdict(list)
    for row in rows:
        own = [block for block in row["hash_ids"] if block not in common]
        if own and len(row["hash_ids"]) <= max_blocks:
            conversations[own[0]].append(row)
    several = [turns for turns in conversations.values() if len(turns) > 1]
    random.Random(seed).shuffle(several)
    chosen: list[dict[str, list[int]]] = []
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


def _rows(path: Path) -> Iterator[dict[str, list[int]]]:
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


def spread_over(counts: Sequence[int]) -> float:
    """Coefficient of variation of the load over replicas: 0 where all got the same."""
    mean = sum(counts) / len(counts)
    return (sum((count - mean) ** 2 for count in counts) / len(counts)) ** 0.5 / mean if mean else 0
