"""Are greedy tokens the same wherever their attention is computed, whoever dies meanwhile?

Requests of mixed lengths go through a real engine whose memory is too small for its batch, first
without a lender, then with none, half and all of them placed with one, as far as there is room. At
random times the lender's worker is killed, and another lender takes its place. The last line of
the output is one JSON object.

Run it as ``python -m benchmarks.lending_exactness`` or ``make bench-lending-exactness``.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.engine import (
    BLOCK_TOKENS,
    EXACT_BLOCK_BYTES,
    call_loans,
    demo_lending_engine,
    end,
)
from benchmarks.result_files import machine, publish, said_by

SHARES = (0.0, 0.5, 1.0)
OWN_BLOCKS, LENT_BLOCKS = 24, 72
LONGEST_PROMPT, LONGEST_ANSWER = 100, 30
LEAST_LIFE_S, MOST_LIFE_S = 5.0, 25.0
_names = itertools.count()


class Asked(NamedTuple):
    prompt: list[int]
    tokens: int


def mixed(count: int, seed: int) -> list[Asked]:
    """Uniform lengths; a third of the prompts begin as the one before."""
    source, asked = random.Random(seed), list[Asked]()
    for _ in range(count):
        prompt = [source.randrange(1000, 40000) for _ in range(source.randint(4, LONGEST_PROMPT))]
        if asked and source.random() < 1 / 3:
            prompt = (asked[-1].prompt[: 2 * BLOCK_TOKENS] + prompt)[:LONGEST_PROMPT]
        asked.append(Asked(prompt, source.randint(1, LONGEST_ANSWER)))
    return asked


def engine(core: int, blocks: int, **lending: Any) -> Any:
    limits = {"max_model_len": 512, "max_num_seqs": 16, "max_num_batched_tokens": 128}
    return demo_lending_engine(core, blocks, lending, **limits)


def answers(
    llm: Any, asked: Sequence[Asked], between: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Of all of them at once; ``between`` is called between outputs, as vLLM's client is for one
    thread only."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    engine, found = llm.llm_engine, dict[str, list[int]]()
    names = [str(next(_names)) for _ in asked]
    for name, one in zip(names, asked, strict=True):
        greedy = SamplingParams(temperature=0, max_tokens=one.tokens, ignore_eos=True)
        engine.add_request(name, TokensPrompt(prompt_token_ids=one.prompt), greedy)
    while len(found) < len(asked):
        for output in engine.step():
            if output.finished:
                found[output.request_id] = list(output.outputs[0].token_ids)
        between()
    return [found[name] for name in names]


class Lenders:
    """Those still alive, of which one lends at a time."""

    def __init__(self, count: int) -> None:
        self._alive = [
            engine(1, OWN_BLOCKS + LENT_BLOCKS, lend_bytes=LENT_BLOCKS * EXACT_BLOCK_BYTES)
            for _ in range(count)
        ]
        self.killed = 0

    def __len__(self) -> int:
        return len(self._alive)

    def lend_to(self, hot: Any) -> int:
        """The side of a new loan of the first of them."""
        cold, name = self._alive[0], f"exact-{next(_names)}"
        path = f"/dev/shm/loomserve-ring-{os.getpid()}-{name}"
        call_loans(cold, "lend", name, path, call_loans(hot, "borrowing"))
        self._name, self._path = name, Path(path)
        return int(call_loans(hot, "borrow", name, path))

    def kill(self) -> None:
        """Whoever lends now, as ``kill -9`` does."""
        os.kill(self._alive[0].collective_rpc("process_id")[0], signal.SIGKILL)
        self._path.unlink(missing_ok=True)
        del self._alive[0]
        self.killed += 1

    def take_back(self) -> None:
        call_loans(self._alive[0], "end_lending", self._name)


class Killer:
    """Lends while requests run, and kills so many lenders at random times."""

    def __init__(self, hot: Any, lenders: Lenders, kills: int, seed: str) -> None:
        self._hot, self._lenders, self._left = hot, lenders, kills
        self._source = random.Random(seed)
        self._begin()

    def _begin(self) -> None:
        self._side = self._lenders.lend_to(self._hot)
        self._until = time.monotonic() + self._source.uniform(LEAST_LIFE_S, MOST_LIFE_S)

    def look(self) -> None:
        if self._left and time.monotonic() >= self._until:
            self._left -= 1
            self._lenders.kill()
            call_loans(self._hot, "end_loan", self._side)
            self._begin()

    def end(self) -> None:
        call_loans(self._hot, "end_loan", self._side)
        self._lenders.take_back()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    asked = mixed(args.requests, args.seed)
    hot = engine(
        0,
        OWN_BLOCKS,
        borrow_bytes=LENT_BLOCKS * EXACT_BLOCK_BYTES,
        placement="ratio",
        patience_ms=2000,
    )
    lenders = Lenders(args.kills + 1)
    alone = answers(hot, asked)
    compared = identical = 0
    lent: dict[str, dict[str, Any]] = {}
    part = -(-len(asked) // len(SHARES))
    for number, share in enumerate(SHARES):
        rows = slice(number * part, (number + 1) * part)
        hot.reset_prefix_cache()
        call_loans(hot, "place", "ratio" if share else "local", share)
        kills = (args.kills - lenders.killed) // (len(SHARES) - number)
        killer = Killer(hot, lenders, kills, f"{args.seed}/{share}")
        woven = answers(hot, asked[rows], killer.look)
        killer.end()
        same = [a == b for a, b in zip(woven, alone[rows], strict=True)]
        compared, identical = compared + len(same), identical + sum(same)
        state = call_loans(hot, "loan_state")
        lent[str(share)] = {"moved": state["moved"], "broken": state["broken"]}
        print(f"share {share}: {sum(same)} of {len(same)} identical, {lent}", flush=True)
    for llm in (hot, *lenders._alive):
        with suppress(Exception):  # some have no worker any more
            end(llm)
    return {
        "compared": compared,
        "identical": identical,
        "lenders_killed": lenders.killed,
        "by_share": lent,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=501)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    facts = machine()
    result = measure(args)
    if result["lenders_killed"] < args.kills:
        parser.error(
            f"only {result['lenders_killed']} of {args.kills} lenders were killed before all was "
            "answered: ask for more requests, or fewer kills"
        )
    setup = {**said_by(args), "own_blocks": OWN_BLOCKS}
    publish("lending_exactness", result, setup=setup, facts=facts)


if __name__ == "__main__":
    main()
