"""How long do streams pause when part of their engine moves to another and back?

How, and what was found: ``benchmarks/migrate.md``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import (
    BLOCK_TOKENS,
    EXACT_BLOCK_BYTES,
    call_loans,
    demo_lending_engine,
)
from benchmarks.harness import parser_of, percentiles, run, spread

Part = dict[str, Any]
LOADS = ("1x512", "1x2048", "1x8000", "8x512", "8x2048", "32x512")
BEFORE_STEPS, AWAY_STEPS = 8, 8
_names = itertools.count()


class Load(NamedTuple):
    streams: int
    context: int

    @classmethod
    def parse(cls, text: str) -> Load:
        streams, context = text.split("x")
        return cls(int(streams), int(context))


class Move(NamedTuple):
    """There and back; times in seconds, rates in tokens a second."""

    step_s: float
    pauses_s: list[float]
    durations_s: list[float]
    copied_bytes: int
    away_step_s: float
    tokens_changed: int


def engine(core: int, blocks: int, context: int, **lending: Any) -> Any:
    limits = {"max_model_len": context, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return demo_lending_engine(core, blocks, lending, **limits)


class Pair:
    """``hot`` moves a part of itself to ``cold``."""

    def __init__(self, hot: Any, cold: Any) -> None:
        self.hot, self.cold = hot, cold

    @contextmanager
    def loan(self, part: Part) -> Iterator[Callable[[], int]]:
        """Lent, weights and all; what is yielded borrows it, and returns its side."""
        name = str(next(_names))
        path = f"/dev/shm/loomserve-ring-{os.getpid()}-{name}"
        call_loans(self.cold, "lend", name, path, call_loans(self.hot, "borrowing", part))
        try:
            yield lambda: int(call_loans(self.hot, "borrow", name, path, part))
        finally:
            for loan in call_loans(self.hot, "loan_state")["loans"]:
                call_loans(self.hot, "end_loan", loan["partition"])
            call_loans(self.cold, "end_lending", name)

    def part(self) -> dict[str, Any]:
        found: dict[str, Any] = call_loans(self.hot, "loan_state")["loans"][0]["shard"]
        return found


class Streams:
    """Requests that decode together, a step at a time."""

    def __init__(self, llm: Any, load: Load, tokens: int, seed: int) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        source = random.Random(seed)
        self._engine = llm.llm_engine
        self.names = [str(next(_names)) for _ in range(load.streams)]
        self.tokens: dict[str, list[int]] = {name: [] for name in self.names}
        greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        for name in self.names:
            prompt = [source.randrange(1000, 40000) for _ in range(load.context)]
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)

    @property
    def running(self) -> bool:
        return bool(self._engine.has_unfinished_requests())

    @property
    def decoding(self) -> bool:
        return all(self.tokens.values())

    def step(self) -> float:
        """Seconds until the next output.

        Raises:
            RuntimeError: there is none any more.
        """
        if not self.running:
            raise RuntimeError("the streams ended before the move did: raise --tokens")
        begin = time.perf_counter()
        for output in self._engine.step():
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
        return time.perf_counter() - begin

    def finish(self) -> list[list[int]]:
        while self.running:
            self.step()
        return [self.tokens[name] for name in self.names]


def moved(
    pair: Pair, load: Load, part: Part, tokens: int, seed: int, undisturbed: list[list[int]]
) -> Move:
    with pair.loan(part) as borrow:
        streams = Streams(pair.hot, load, tokens, seed)
        while not streams.decoding:
            streams.step()
        before = [streams.step() for _ in range(BEFORE_STEPS)]
        side = borrow()
        durations = [until(pair, streams, "away")]
        pauses = [pair.part()["pause_s"]]
        away = [streams.step() for _ in range(AWAY_STEPS)]
        call_loans(pair.hot, "drain_loan", side)
        durations.append(until(pair, streams, "home"))
        home = pair.part()
        pauses.append(home["pause_s"])
    found = streams.finish()
    return Move(
        statistics.median(before),
        pauses,
        durations,
        home["copied_bytes"],
        statistics.median(away),
        sum(
            a != b
            for x, y in zip(found, undisturbed, strict=True)
            for a, b in zip(x, y, strict=True)
        ),
    )


def until(pair: Pair, streams: Streams, phase: str) -> float:
    """Step until the part is there; the seconds it took."""
    begin = time.perf_counter()
    while pair.part()["phase"] != phase:
        streams.step()
    return time.perf_counter() - begin


def figures(moves: list[Move], kind: str) -> dict[str, Any]:
    pauses = [pause for one in moves for pause in one.pauses_s]
    steps = [pause / one.step_s for one in moves for pause in one.pauses_s]
    return {
        **percentiles(f"{kind}_pause_ms", [1000 * pause for pause in pauses]),
        **percentiles(f"{kind}_pause_steps", steps),
        f"{kind}_move_ms": 1000 * statistics.median(s for one in moves for s in one.durations_s),
        f"{kind}_step_while_away": spread(one.away_step_s / one.step_s for one in moves),
    }


def measured(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    loads = [Load.parse(text) for text in args.loads.split(",")]
    most = max(load.streams * (load.context + args.tokens) for load in loads)
    longest = max(load.context for load in loads) + args.tokens + 1
    blocks = max(most, longest) // BLOCK_TOKENS + 2 * max(load.streams for load in loads) + 2
    hot = engine(0, blocks, longest, borrow_bytes=blocks * EXACT_BLOCK_BYTES, patience_ms=5000)
    cold = engine(1, 2 * blocks, longest, lend_bytes=blocks * EXACT_BLOCK_BYTES)
    pair = Pair(hot, cold)
    first, end = map(int, args.layers.split("-"))
    parts: dict[str, Part] = {"head": {"heads": args.heads}, "layer": {"layers": [first, end]}}
    moves: dict[tuple[str, str], list[Move]] = {}
    for number, load in itertools.product(range(args.runs), loads):
        undisturbed = Streams(hot, load, args.tokens, number).finish()
        for kind, part in parts.items():
            hot.reset_prefix_cache()
            one = moved(pair, load, part, args.tokens, number, undisturbed)
            moves.setdefault((kind, f"{load.streams}x{load.context}"), []).append(one)
            print(f"run {number + 1}, {kind}s, {load.streams} x {load.context} tokens: {one}")
        hot.reset_prefix_cache()
    every = {
        kind: [one for (of, _), some in moves.items() if of == kind for one in some]
        for kind in parts
    }
    return {
        **{name: value for kind in parts for name, value in figures(every[kind], kind).items()},
        "tokens_changed": sum(one.tokens_changed for some in moves.values() for one in some),
        "runs": args.runs,
        "by_load": {f"{kind} {load}": figures(some, kind) for (kind, load), some in moves.items()},
        "blocks": blocks,
    }


def main() -> int:
    parser = parser_of("migrate", __doc__)
    parser.add_argument("--loads", default=",".join(LOADS), help="streams x tokens of context")
    parser.add_argument("--heads", type=int, default=1, help="KV heads that move")
    parser.add_argument("--layers", default="15-30", help="layers that move: first-end")
    parser.add_argument("--tokens", type=int, default=120, help="output tokens of a stream")
    parser.add_argument("--runs", type=int, default=3)
    return run("migrate", parser.parse_args(), measured)


if __name__ == "__main__":
    sys.exit(main())
