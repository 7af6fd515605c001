"""The connector's half in EngineCore, with a store that answers as it is told."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.request import RequestStatus

from loomserve.kvstore.engine.connector_scheduler import StoreConnectorScheduler, TransferAll
from loomserve.kvstore.engine.messages import Transferred
from loomserve.kvstore.engine.namespaces import Namespaces
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.client import StoreAwayError, StoreClient
from loomserve.kvstore.server.protocol import (
    HANDED_OVER,
    HANDED_OVER_BY,
    HANDS_OVER,
    PROMPT_CHAIN,
    Done,
    Found,
    Lookup,
    Outdated,
    Release,
    encode_slots,
)

SIZE = 4
RANKS = [b"rank 0", b"rank 1"]


@dataclass
class Asked:
    """A request as the connector knows it; block hashes of its full blocks are counted up."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    kv_transfer_params: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool = False
    lora_request: None = None
    status: RequestStatus = RequestStatus.FINISHED_STOPPED

    @property
    def block_hashes(self) -> list[bytes]:
        return [bytes([at]) * 32 for at in range(self.num_tokens // SIZE)]

    @property
    def all_token_ids(self) -> list[int]:
        return list(range(self.num_tokens))


@dataclass
class Store:
    """Holds the first ``blocks`` blocks of every chain, and leases them."""

    blocks: int = 0
    ready_s: float = 0.0
    resident: int = 0
    remote: int = 0
    away: bool = False
    asked: list[Any] = field(default_factory=list)
    leased: set[int] = field(default_factory=set)

    def ask(self, request: Any, expected: type[Any]) -> Any:
        if self.away:
            raise StoreAwayError("away")
        self.asked.append(request)
        if isinstance(request, Outdated):
            return Done()
        if isinstance(request, Release):
            self.leased -= set(request.leases)
            return Done()
        assert isinstance(request, Lookup)
        here = min(self.blocks, len(request.keys) // KEY_BYTES)
        lease = len(self.asked) if here > request.skip else 0
        self.leased |= {lease} - {0}
        slots = encode_slots(list(range(request.skip, here)))
        return Found(here, max(here, self.resident), lease, slots, self.ready_s, self.remote)

    def tell(self, request: Any) -> None:
        with suppress(StoreAwayError):
            self.ask(request, object)

    def lookups(self) -> list[Lookup]:
        return [one for one in self.asked if isinstance(one, Lookup)]


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def half(store: Store) -> StoreConnectorScheduler:
    names = SimpleNamespace(block_size=SIZE, of_ranks=lambda adapter: RANKS)
    return StoreConnectorScheduler(cast("StoreClient", store), cast("Namespaces", names))


def asked(tokens: int = 10, **given: Any) -> Any:
    return Asked("r", tokens, tokens, **given)


def block_state(tables: dict[str, list[int]]) -> KVConnectorBlockState:
    return KVConnectorBlockState(set(tables), lambda name: (tables[name],), {})


def step(
    half: StoreConnectorScheduler,
    request: Any,
    tokens: int,
    table: Sequence[int],
    now: float = 1.0,
    found: int = 0,
) -> Any:
    """A step that computes the request's first tokens, but for those that were found."""
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={request.request_id: tokens - found},
        scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id, num_computed_tokens=found)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
        kv_connector_block_state=block_state({request.request_id: list(table)}),
    )
    return half.step(cast("Any", scheduled), now)


@dataclass
class Policy(TransferAll):
    prefetches: bool = False  # type: ignore[misc]
    early: int = 10**9
    own: bool = True
    worth: bool = True

    def early_blocks(self, tokens: int) -> int:
        return self.early

    def in_own_memory(self, request: Any) -> bool:
        return self.own

    def worth_loading(self, tokens: int) -> bool:
        return self.worth


def test_what_the_store_has_is_loaded_by_every_rank(
    half: StoreConnectorScheduler, store: Store
) -> None:
    store.blocks = 2
    request = asked()
    assert half.matched_tokens(request, 0, 0.0) == 2 * SIZE
    assert half.matched_tokens(request, 0, 0.1) == 2 * SIZE
    assert len(store.lookups()) == len(RANKS), "the answer stands for a while"
    half.allocated(request, [7, 8, 9], 2 * SIZE)
    (load,) = step(half, request, 2, [7, 8, 9]).loads
    assert {rank: (one.blocks, one.slots) for rank, one in load.items()} == {
        0: ([7, 8], [0, 1]),
        1: ([7, 8], [0, 1]),
    }
    assert {one.lease for one in load.values()} == store.leased
    assert step(half, request, 1, [7, 8, 9]).loads == []


def test_a_lease_ends_when_its_request_needs_nothing_or_is_gone(
    half: StoreConnectorScheduler, store: Store
) -> None:
    store.blocks = 2
    half.matched_tokens(asked(), 0, 0.0)
    assert len(store.leased) == len(RANKS)
    half.allocated(asked(), [7, 8, 9], 0)
    assert not store.leased
    half.matched_tokens(asked(), 0, 0.0)
    assert half.remove(asked()) is None
    assert not store.leased


@pytest.mark.parametrize(
    ("policy", "request_"),
    [
        (Policy(own=False), asked()),
        (Policy(worth=False), asked()),
        (Policy(), asked(skip_reading_prefix_cache=True)),
        (Policy(), asked(SIZE)),
    ],
    ids=["with a lender", "computed sooner", "wants all logits", "one block"],
)
def test_the_store_is_not_asked_in_vain(
    half: StoreConnectorScheduler, store: Store, policy: Policy, request_: Any
) -> None:
    half.policy = policy
    assert half.matched_tokens(request_, 0, 0.0) == 0
    assert store.asked == []


def test_blocks_that_come_from_ssd_are_awaited_while_that_is_quicker(
    half: StoreConnectorScheduler, store: Store
) -> None:
    store.resident, store.ready_s = 2, 0.005
    assert half.matched_tokens(asked(), 0, 0.0) is None
    assert half.matched_tokens(asked(), 0, 0.001) is None
    assert len(store.lookups()) == len(RANKS), "not asked again at once"
    store.blocks = 2
    assert half.matched_tokens(asked(), 0, 0.01) == 2 * SIZE
    store.blocks, store.ready_s = 0, 5.0
    other = replace(asked(), request_id="other")
    assert half.matched_tokens(other, 0, 0.0) == 0


def test_blocks_of_another_node_are_awaited_while_that_is_quicker(
    half: StoreConnectorScheduler, store: Store
) -> None:
    store.resident, store.remote, store.ready_s = 0, 2, 0.005
    assert half.matched_tokens(asked(), 0, 0.0) is None
    first, *_ = store.lookups()
    assert first.block_s == pytest.approx(SIZE * 1e-3), "until its steps have been timed"
    assert first.holder == ""
    store.remote, store.ready_s, store.blocks = 0, 0.0, 2
    assert half.matched_tokens(asked(), 0, 0.01) == 2 * SIZE
    store.blocks, store.remote, store.ready_s = 0, 2, 0.1
    other = replace(asked(), request_id="other")
    assert half.matched_tokens(other, 0, 0.0) == 0


def test_an_engine_says_which_node_has_what_it_hands_over_and_the_next_one_asks_there(
    store: Store,
) -> None:
    names = SimpleNamespace(block_size=SIZE, of_ranks=lambda adapter: RANKS)
    half = StoreConnectorScheduler(cast("Any", store), cast("Any", names), "n1")
    prompt = asked(kv_transfer_params={HANDS_OVER: True})
    half.add(prompt)
    assert half.remove(prompt) == {HANDED_OVER_BY: "n1"}
    assert half.remove(asked()) is None
    for node, asks in (("n2", "n2"), ("n1", "")):
        store.asked.clear()
        rest = asked(kv_transfer_params={HANDED_OVER: 10, HANDED_OVER_BY: node})
        half.matched_tokens(rest, 0, 0.0)
        half.remove(rest)
        assert {lookup.holder for lookup in store.lookups()} == {asks}


def test_with_the_store_away_requests_are_computed(
    half: StoreConnectorScheduler, store: Store
) -> None:
    store.away = True
    assert half.matched_tokens(asked(), 0, 0.0) == 0
    half.remove(asked())


def test_statistics_come_twice_a_second_and_when_the_last_request_has_ended(
    half: StoreConnectorScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked_at: list[float] = []
    first, last = asked(), replace(asked(), request_id="last")
    for request in (first, last):
        half.add(request)
    monkeypatch.setattr(half.policy, "stats", lambda: asked_at.append(now))
    for now in (0.0, 0.1, 0.4, 0.6, 0.7):
        half.stats(now)
    half.remove(first)
    for now in (0.8, 1.2):
        half.stats(now)
    half.remove(last)
    now = 1.3
    half.stats(now)
    assert asked_at == [0.0, 0.6, 1.2, 1.3]


def test_full_blocks_are_saved_once_and_only_as_many_as_the_policy_allows(
    half: StoreConnectorScheduler,
) -> None:
    request = asked(12)
    half.add(request)
    half.policy = Policy(early=1)
    (save,) = step(half, request, 10, [5, 6, 7]).saves
    assert [len(one.keys) // KEY_BYTES for one in save.values()] == [1, 1]
    half.policy = Policy()
    (save,) = step(half, request, 12, [5, 6, 7]).saves
    assert (save[0].blocks, save[0].first) == ([5, 6, 7], 1)
    assert step(half, request, 12, [5, 6, 7]).saves == []


@pytest.mark.parametrize(("found", "early", "first"), [(0, 9, 0), (8, 9, 2), (8, 1, 1)])
def test_a_save_says_which_of_its_blocks_are_new(
    half: StoreConnectorScheduler, found: int, early: int, first: int
) -> None:
    request = asked(12)
    half.add(request)
    half.policy = Policy(early=early)
    (save,) = step(half, request, 12, [5, 6, 7], found=found).saves
    assert save[0].first == first


def test_the_block_that_an_answer_fills_is_saved_in_parts_each_in_the_place_of_the_last(
    half: StoreConnectorScheduler, store: Store
) -> None:
    request = asked(6)
    half.add(request)
    # Of a prompt that is not computed to its end, full blocks alone.
    (save,) = step(half, request, 5, [5, 6]).saves
    assert (save[0].blocks, save[0].outdated) == ([5], b"")
    tails = []
    for tokens in (6, 7):
        request.num_tokens = tokens
        (save,) = step(half, request, tokens, [5, 6]).saves
        assert save[0].blocks == [5, 6]
        assert save[0].outdated == (tails[-1] if tails else b"")
        tails.append(save[0].keys[-KEY_BYTES:])
        assert step(half, request, tokens, [5, 6]).saves == []
    assert len(set(tails)) == 2
    request.num_tokens = 8
    (save,) = step(half, request, 8, [5, 6]).saves
    assert save[0].keys[-KEY_BYTES:] == bytes([1]) * KEY_BYTES
    assert (save[0].blocks, save[0].outdated) == ([5, 6], tails[-1])
    half.remove(request)
    assert store.asked == [], "all that is saved are full blocks"


@pytest.fixture
def hurried(store: Store) -> StoreConnectorScheduler:
    """To save an unfilled block takes a tenth of a second, so that one comes every ten."""
    names = SimpleNamespace(block_size=SIZE, of_ranks=lambda adapter: RANKS)
    half = StoreConnectorScheduler(cast("Any", store), cast("Any", names))
    for name in "abc":
        half.add(cast("Any", Asked(name, 6, 6)))
    assert unfilled(half, (6, 6, 6), 0.0) == {"a", "b", "c"}, "at first, as many as there are"
    half.on_transfer(Transferred(100, 0.0, 0, 0.0, 1, 0.1))
    # Of those saved up none shall be left.
    while half._tails.blocks(0.0):
        half._tails.spend()
    return half


def unfilled(half: StoreConnectorScheduler, tokens: Sequence[int], now: float) -> set[str]:
    """Requests whose unfilled block is saved, once they have so many tokens."""
    requests = half._saves._requests
    for request, count in zip(requests.values(), tokens, strict=True):
        cast("Any", request).num_tokens = count
    scheduled = SimpleNamespace(
        total_num_scheduled_tokens=3,
        num_scheduled_tokens=dict.fromkeys(requests, 1),
        scheduled_new_reqs=[],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(requests), num_computed_tokens=[count - 1 for count in tokens]
        ),
        kv_connector_block_state=block_state(
            {name: [10 * at, 10 * at + 1] for at, name in enumerate(requests, 1)}
        ),
    )
    saves = half.step(cast("Any", scheduled), now).saves
    return {" abc"[one[0].blocks[0] // 10] for one in saves if len(one[0].blocks) == 2}


def test_parts_of_blocks_are_saved_as_far_as_their_share_of_the_time_goes_the_longest_first(
    hurried: StoreConnectorScheduler,
) -> None:
    assert unfilled(hurried, (7, 7, 7), 5.0) == set()
    assert unfilled(hurried, (7, 7, 7), 11.0) == {"a"}
    assert unfilled(hurried, (7, 7, 7), 21.0) == {"b"}
    assert unfilled(hurried, (7, 7, 7), 121.0) == {"c"}


def test_who_cannot_be_saved_keeps_nobody_from_it(hurried: StoreConnectorScheduler) -> None:
    class WithLender(Policy):
        def in_own_memory(self, request: Any) -> bool:
            return bool(request.request_id != "a")

    hurried.policy = WithLender()
    assert unfilled(hurried, (7, 7, 7), 11.0) == {"b"}


def test_no_part_of_a_block_is_saved_before_the_blocks_ahead_of_it(
    half: StoreConnectorScheduler,
) -> None:
    request = asked(10)
    half.add(request)
    for early, blocks in ((1, [5]), (1, [5, 6]), (0, None), (1, [5, 6, 7])):
        half.policy = Policy(early=early)
        saves = step(half, request, 10, [5, 6, 7]).saves
        assert [save[0].blocks for save in saves] == ([] if blocks is None else [blocks])


@pytest.mark.parametrize("aborted", [False, True])
def test_the_store_forgets_an_unfilled_block_with_its_answer_unless_that_may_go_on(
    half: StoreConnectorScheduler, store: Store, aborted: bool
) -> None:
    request = asked(6)
    if aborted:
        request.status = RequestStatus.FINISHED_ABORTED
    half.add(request)
    (save,) = step(half, request, 6, [5, 6]).saves
    half.remove(request)
    forgotten = [] if aborted else [Outdated(name, save[0].keys) for name in RANKS]
    assert store.asked == forgotten


@pytest.mark.parametrize(("there", "tokens"), [(3, 9), (2, 8)])
def test_who_goes_on_with_an_answer_finds_the_part_of_a_block_that_it_had_filled(
    half: StoreConnectorScheduler, store: Store, there: int, tokens: int
) -> None:
    store.blocks = there
    request = Asked("r", num_tokens=10, num_prompt_tokens=6)
    assert half.matched_tokens(request, 0, 0.0) == tokens
    assert {(one.use, len(one.keys) // KEY_BYTES) for one in store.lookups()} == {(False, 3)}
    half.allocated(request, [7, 8, 9], tokens)
    (load,) = step(half, request, 1, [7, 8, 9]).loads
    # The step writes into the last block.
    assert (load[0].blocks, load[0].ahead) == ([7, 8, 9][:there], there == 3)


def test_a_prompt_that_is_handed_over_is_saved_to_its_last_token(
    half: StoreConnectorScheduler,
) -> None:
    request = asked(10, kv_transfer_params={HANDS_OVER: True})
    half.add(request)
    half.policy = Policy(early=0)
    (save,) = step(half, request, 10, [5, 6, 7]).saves
    assert save[0].blocks == [5, 6, 7]


def test_what_is_swapped_out_is_saved_before_the_step_and_leased_until_it_is_back(
    half: StoreConnectorScheduler, store: Store
) -> None:
    request = asked()
    half.add(request)
    half.policy = Policy(prefetches=True)
    assert half.unsaved_blocks(request, 10) == 3
    half.swap_out(request, 10, [5, 6, 7], recompute_s=3.0, now=1.0)
    (swap_out,) = step(half, request, 0, [], now=1.1).swap_outs
    assert [(one.blocks, one.recompute_s) for one in swap_out.values()] == [([5, 6, 7], 1.0)] * 2
    assert half.unsaved_blocks(request, 10) == 1
    store.blocks = 3
    step(half, request, 0, [], now=1.2)
    assert len(store.leased) == len(RANKS)
    assert half.matched_tokens(request, 0, 1.3) == 9
    assert half.prefetches(request)
    half.allocated(request, [1, 2, 3], 9)
    assert not half.prefetches(request)
    transfers = step(half, request, 0, [], now=1.4)
    assert (list(transfers.fetches), transfers.loads) == ([request.request_id], [])
    assert {one.lease for one in transfers.fetches["r"].values()} == store.leased


def test_a_request_that_asks_is_told_the_chain_of_its_prompt(half: StoreConnectorScheduler) -> None:
    told = half.remove(asked(10, kv_transfer_params={PROMPT_CHAIN: True}))
    keys = bytes(KEY_BYTES) + bytes([1]) * KEY_BYTES
    assert told == {
        PROMPT_CHAIN: {"namespaces": [name.hex() for name in RANKS], "keys": keys.hex()}
    }
