"""Saves found by a calendar of steps are those of a walk over all requests of each step."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.kvstore.engine.messages import Transferred
from loomserve.kvstore.engine.pace import StepPace, TailBudget
from loomserve.kvstore.engine.request_keys import hands_over
from loomserve.kvstore.engine.save_tracker import SaveCalendar, SaveTracker
from loomserve.kvstore.engine.swap_ledger import HANDOFF_S
from loomserve.kvstore.engine.transfers.transfer import Save
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.protocol import HANDS_OVER

Copies = list[dict[int, Save]]


def block_tables(tables: dict[str, Any]) -> Any:
    """As vLLM's ``KVConnectorBlockState`` has them."""
    return SimpleNamespace(block_ids=tables, get_block_ids=tables.__getitem__)


class WalkingTracker(SaveTracker):
    """Looks at every request of a step."""

    def saves(
        self,
        scheduled: Any,
        early_blocks: Callable[[], int],
        in_own_memory: Callable[[Any], bool],
        now: float,
    ) -> Iterator[dict[int, Save]]:
        early = early_blocks()
        tables = scheduled.kv_connector_block_state.block_ids
        before_step = {new.req_id: new.num_computed_tokens for new in scheduled.scheduled_new_reqs}
        found = {name: tokens // self._block_size for name, tokens in before_step.items()}
        cached = scheduled.scheduled_cached_reqs
        before_step.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed = {
            name: tokens + scheduled.num_scheduled_tokens[name]
            for name, tokens in before_step.items()
        }
        room = self._tails.blocks(now) > 0
        new = [
            name
            for name, after in computed.items()
            if name in self._requests and self._has_new(name, after, room)
        ]
        for name in sorted(
            new, key=lambda one: self._saved[one].tokens(self._block_size) - computed[one]
        ):
            request, after, saved = self._requests[name], computed[name], self._saved[name]
            if not in_own_memory(request):
                continue
            outdated, before = saved.tail_chain[-KEY_BYTES:], saved.blocks
            if hands_over(request):
                keys = self._to_hand_over(request, after, saved)
            else:
                budget = self._tails.blocks(now) > 0
                keys = self._computed(request, after, saved, early, room=budget)
                early -= max(0, len(keys) // KEY_BYTES - before)
            if not keys:
                continue
            blocks = tables[name][0][: len(keys) // KEY_BYTES]
            if 0 in blocks:
                continue
            first = min(max(before, found.get(name, 0)), len(blocks))
            keep_s = HANDOFF_S if hands_over(request) else 0.0
            recompute_s = self._block_size * self._pace.s_per_token
            yield {0: Save(b"rank", keys, blocks, recompute_s, keep_s, outdated, first)}


@dataclass(eq=False)
class Served:
    """One of vLLM's requests, of which the engine knows the newest ``late`` tokens a step later."""

    request_id: str
    num_prompt_tokens: int
    size: int
    kv_transfer_params: dict[str, Any] | None = None
    lora_request: None = None
    known: int = 0
    computed: int = 0
    table: list[int] = field(default_factory=list)

    @property
    def block_hashes(self) -> list[bytes]:
        start = self.request_id.encode()
        return [(start + bytes([at])).ljust(32) for at in range(self.known // self.size)]

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.known))


class Engine:
    """Steps of an engine that does all that one may do to its requests, with both trackers."""

    def __init__(self, source: random.Random) -> None:
        self.source, self.size = source, source.choice([1, 4, 6, 9, 16])
        self.late = source.choice([0, 0, 1, 2])
        self.share = source.choice([0.0001, 0.01, 10.0])
        self.running: list[Served] = []
        self.waiting: list[Served] = []
        self.known: set[str] = set()
        self.now, self.made = 0.0, 0
        names: Any = SimpleNamespace(block_size=self.size, of_ranks=lambda adapter: [b"rank"])
        self.budgets = [TailBudget(self.share), TailBudget(self.share)]
        self.trackers = [
            kind(names, StepPace(self.size), budget)
            for kind, budget in zip((SaveTracker, WalkingTracker), self.budgets, strict=True)
        ]

    def arrive(self) -> None:
        params = {HANDS_OVER: True} if self.source.random() < 0.1 else None
        tokens = self.source.randint(1, 40)
        one = Served(f"r{self.made}", tokens, self.size, params, known=tokens)
        self.made += 1
        self.waiting.append(one)
        for tracker in self.trackers:
            tracker.add(cast("Any", one))

    def leave(self) -> None:
        one = self.running.pop(self.source.randrange(len(self.running)))
        chains = [tracker.remove(cast("Any", one)) for tracker in self.trackers]
        assert chains[0] == chains[1]

    def preempt(self) -> None:
        one = self.running.pop(self.source.randrange(len(self.running)))
        if self.source.random() < 0.5:
            for tracker in self.trackers:
                tracker.swapped_out(cast("Any", one), one.computed)
        # It may come back in this very step with the tokens that it would have had.
        one.computed = self.source.choice([0, one.computed])
        one.table = []
        self.waiting.insert(0, one)

    def one_step(self) -> tuple[Copies, Copies]:
        for act, chance, there in (
            (self.arrive, 0.15, True),
            (self.leave, 0.05, self.running),
            (self.preempt, 0.05, self.running),
        ):
            if there and self.source.random() < chance:
                act()
        if self.running and self.source.random() < 0.03:
            # Blocks that did not load are computed again.
            one = self.source.choice(self.running)
            one.computed = max(0, one.computed - self.source.randint(1, 2 * self.size))
        scheduled = self.scheduled(budget=self.source.choice([3, 20, 1000]))
        early, own = self.source.choice([0, 1, 10**9]), self.source.random() < 0.9
        saves = [
            list(tracker.saves(scheduled, lambda: early, lambda one: own, self.now))
            for tracker in self.trackers
        ]
        for one in self.running:
            one.known = max(one.known, one.computed + 1 - self.late)
        if self.source.random() < 0.2:
            blocks = self.source.randint(0, 2)
            for budget in self.budgets:
                budget.learn(Transferred(100, 0.0, 0, 0.0, blocks, 0.01))
        self.now += self.source.choice([0.001, 0.02, 0.5])
        return saves[0], saves[1]

    def scheduled(self, budget: int) -> Any:
        new, cached, before = [], [], []
        tokens: dict[str, int] = {}
        tables: dict[str, tuple[list[int]]] = {}
        started = self.waiting[: self.source.randint(0, 2)]
        del self.waiting[: len(started)]
        self.running += started
        for one in self.running:
            count = min(max(1, one.known - one.computed), budget)
            if not count or self.source.random() < 0.02:
                continue
            budget -= count
            if one.request_id in self.known:
                cached.append(one.request_id)
                before.append(one.computed)
            else:
                self.known.add(one.request_id)
                if self.source.random() < 0.3:
                    # What the store or the prefix cache has.
                    one.computed = one.num_prompt_tokens // 2
                    count = one.num_prompt_tokens - one.computed
                new.append(SimpleNamespace(req_id=one.request_id, num_computed_tokens=one.computed))
            tokens[one.request_id] = count
            one.computed += count
            while len(one.table) * self.size < one.computed:
                one.table.append(self.source.randint(0 if self.source.random() < 0.02 else 1, 99))
            tables[one.request_id] = (one.table,)
        return SimpleNamespace(
            scheduled_new_reqs=new,
            scheduled_cached_reqs=SimpleNamespace(req_ids=cached, num_computed_tokens=before),
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            kv_connector_block_state=block_tables(tables),
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_same_blocks_are_saved_in_the_same_steps_as_by_a_walk(seed: int) -> None:
    engine = Engine(random.Random(seed))
    for number in range(120):
        saved, walked = engine.one_step()
        assert saved == walked, f"step {number}"


def test_such_steps_have_saves_of_full_blocks_and_of_unfilled_ones_and_steps_without() -> None:
    engine, counts, tails = Engine(random.Random(3)), [], 0
    for _ in range(300):
        saved, _ = engine.one_step()
        counts.append(len(saved))
        tails += sum(bool(one[0].outdated) for one in saved)
    assert counts.count(0) > 20
    assert max(counts) > 1
    assert tails > 5


def test_a_quiet_step_looks_at_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(random.Random(0))
    engine.size, engine.late = 16, 0
    names: Any = SimpleNamespace(block_size=16, of_ranks=lambda adapter: [b"rank"])
    tracker = SaveTracker(names, StepPace(16), TailBudget())
    ones = [Served(f"r{at}", 1, 16, known=1) for at in range(8)]
    for one in ones:
        tracker.add(cast("Any", one))
    looked: list[str] = []
    monkeypatch.setattr(tracker, "_enter", lambda one: looked.append(one))
    monkeypatch.setattr(SaveCalendar, "_changed", lambda *_: pytest.fail("walks"))
    calendar = tracker._calendar
    calendar._ahead = {one.request_id: 1 for one in ones}
    calendar._expected = len(ones)
    for tokens in range(1, 4):
        scheduled: Any = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=[one.request_id for one in ones], num_computed_tokens=[tokens] * len(ones)
            ),
            num_scheduled_tokens={one.request_id: 1 for one in ones},
            total_num_scheduled_tokens=len(ones),
            kv_connector_block_state=block_tables({}),
        )
        asked = tracker.saves(scheduled, lambda: pytest.fail("asked"), lambda _: True, 0.0)
        assert list(asked) == []
    assert looked == []
