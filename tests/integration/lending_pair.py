"""A hot engine that borrows from a cold one, both real, and the requests that tests give them."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import engine as engines
from benchmarks.engine import EXACT, call_loans
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import RingStats
from tests.integration.cores import core

OWN_BLOCKS = 24
_names = itertools.count()


def lending_engine(model: str, *, lending: dict[str, Any], number: int = 0, **options: Any) -> Any:
    """One that runs on the test's core of this number."""
    return engines.lending_engine(
        model,
        lending,
        {"queue": "fair", "preemption": "recompute"},
        core=core(number),
        dtype=EXACT,
        **{
            "max_model_len": 512,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 128,
            **options,
        },
    )


@dataclass
class Pair:
    """``hot`` borrows from ``cold``, whose engines are real and of the same machine."""

    hot: Any
    cold: Any

    def call(self, engine: Any, method: str, *args: Any) -> Any:
        return call_loans(engine, method, *args)

    @contextmanager
    def loan(self) -> Iterator[Callable[[], RingStats]]:
        """While open, hot requests may lie with the cold engine; yields the ring's counters."""
        name = f"test-{next(_names)}"
        path = f"/dev/shm/loomserve-ring-{os.getpid()}-{name}"
        self.call(self.cold, "lend", name, path, self.call(self.hot, "borrowing"))
        partition = self.call(self.hot, "borrow", name, path)
        ring = Ring.attach(Path(path))
        try:
            yield ring.stats
        finally:
            self.call(self.hot, "end_loan", partition)
            self.call(self.cold, "end_lending", name)
            ring.close()

    def place(self, placement: str, share: float = 0.0) -> None:
        self.call(self.hot, "place", placement, share)

    def loans(self) -> list[dict[str, Any]]:
        loans: list[dict[str, Any]] = self.call(self.hot, "loan_state")["loans"]
        return loans


class ShardLoan:
    """The pair's one loan, which holds a shard of the hot engine from :meth:`begin` on."""

    def __init__(self, pair: Pair, **shard: Any) -> None:
        self._pair = pair
        self._shard = shard
        self._name = f"shard-{os.urandom(3).hex()}"
        self._path = f"/dev/shm/loomserve-ring-{os.getpid()}-{self._name}"
        self._partition: int | None = None

    def begin(self) -> None:
        asked = self._pair.call(self._pair.hot, "borrowing", self._shard)
        self._pair.call(self._pair.cold, "lend", self._name, self._path, asked)
        self._partition = self._pair.call(
            self._pair.hot, "borrow", self._name, self._path, self._shard
        )
        self.ring = Ring.attach(Path(self._path))

    @property
    def phase(self) -> str:
        """Where nothing runs, to look moves it on."""
        (loan,) = self._pair.loans()
        return str(loan["shard"]["phase"])

    def come_home(self) -> bool:
        return bool(self._pair.call(self._pair.hot, "drain_loan", self._partition))

    def end(self) -> None:
        if self._partition is not None:
            self._pair.call(self._pair.hot, "end_loan", self._partition)
            self.ring.close()
        self._pair.call(self._pair.cold, "end_lending", self._name)


@contextmanager
def shard_loan(pair: Pair, **shard: Any) -> Iterator[ShardLoan]:
    """Ended even if the test fails, so that the others have a pair without one."""
    loan = ShardLoan(pair, **shard)
    try:
        yield loan
    finally:
        loan.end()


def prompts(seed: int, number: int, longest: int = 150) -> list[list[int]]:
    source = random.Random(seed)
    return [
        [source.randrange(1000, 40000) for _ in range(source.randrange(5, longest))]
        for _ in range(number)
    ]


def answers(
    engine: Any, asked: Sequence[list[int]], tokens: int = 40, seed: int | None = None
) -> list[list[int]]:
    """Greedy ones, or with a seed sampled ones."""
    return [list(one.outputs[0].token_ids) for one in outputs(engine, asked, tokens, seed)]


def outputs(
    engine: Any, asked: Sequence[list[int]], tokens: int, seed: int | None = None
) -> list[Any]:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(
        temperature=0 if seed is None else 1, seed=seed, max_tokens=tokens, ignore_eos=True
    )
    found: list[Any] = engine.generate(
        [TokensPrompt(prompt_token_ids=prompt) for prompt in asked], params, use_tqdm=False
    )
    return found


def begin(engine: Any, name: str, prompt: list[int], tokens: int) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    engine.add_request(name, TokensPrompt(prompt_token_ids=prompt), greedy)
