"""The task ring: what a lender computes is what the borrower would have, whoever dies meanwhile."""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from vllm import _custom_ops as ops

from loomserve.platform.base.errors import StartError
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring import native, ring
from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import ITEM_BYTES, Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine, RingTask
from tests.unit.stopping import stop
from tests.waiting import PATIENCE_S

# The processes of both files are forked from one that has imported vLLM.
pytestmark = pytest.mark.xdist_group("rings")

BLOCK = 32
BLOCKS = 12
ABREAST = Rows(3, BLOCKS // 3)
"""Far longer than any answer takes, so that a busy machine fails no test."""


def geometry(
    layers: int = 2, query_heads: int = 9, kv_heads: int = 3, dtype: str = "float32"
) -> Geometry:
    return Geometry(layers, query_heads, kv_heads, 64, BLOCK, dtype, 64**-0.5, "vec")


GQA, MHA = geometry(), geometry(query_heads=4, kv_heads=4)
GEOMETRIES = (GQA, MHA, replace(GQA, dtype="bfloat16"), replace(MHA, sliding_window=40))


class Memory:
    """A lender's memory: a borrower's layers lie side by side in each block, and a stranger's."""

    def __init__(self, of: Geometry) -> None:
        shape = (BLOCKS, of.layers + 1, of.kv_heads, 2 * BLOCK, of.head_size)
        self.bytes = torch.zeros(shape, dtype=getattr(torch, of.dtype))
        self.bytes[:, of.layers] = 7
        self.caches = []
        for layer in range(of.layers):
            key, value = self.bytes[:, layer].chunk(2, dim=2)
            self.caches.append((key, value))


@dataclass
class Step:
    """What one forward pass hands to attention in each layer, its tensors being views of qkv."""

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    qkv: Tensor
    """[layers, tokens, heads of all three, head_size]"""

    def of_layer(self, layer: int, of: Geometry) -> tuple[Tensor, Tensor, Tensor]:
        heads = (of.query_heads, of.kv_heads, of.kv_heads)
        query, key, value = self.qkv[layer].split(heads, dim=1)
        return query, key, value


def step(of: Geometry, before: list[int], added: list[int], seed: int = 0) -> Step:
    """Requests i of ``before[i]`` tokens in the cache get ``added[i]`` more, in blocks 3i, …"""
    lens = torch.tensor(before) + torch.tensor(added)
    table = torch.arange(3 * len(added)).view(-1, 3)
    slots = [
        int(table[i, at // BLOCK]) * BLOCK + at % BLOCK
        for i, end in enumerate(lens.tolist())
        for at in range(before[i], end)
    ]
    heads = of.query_heads + 2 * of.kv_heads
    random = torch.Generator().manual_seed(seed)
    qkv = torch.randn(of.layers, len(slots), heads, of.head_size, generator=random)
    return Step(
        torch.tensor([0, *torch.tensor(added).cumsum(0).tolist()], dtype=torch.int32),
        lens.int(),
        table.int(),
        torch.tensor(slots, dtype=torch.int64),
        qkv.to(getattr(torch, of.dtype)),
    )


class Local:
    """The same attention where the borrower would have done it itself."""

    def __init__(self, of: Geometry) -> None:
        self.geometry = of
        shape = (of.layers, BLOCKS, of.kv_heads, 2 * BLOCK, of.head_size)
        self.cache = torch.zeros(shape, dtype=getattr(torch, of.dtype))

    def attend(self, layer: int, one: Step) -> Tensor:
        of = self.geometry
        query, key, value = one.of_layer(layer, of)
        key_cache, value_cache = self.cache[layer].chunk(2, dim=2)
        metadata = ops.cpu_attn_get_scheduler_metadata(
            len(one.seq_lens), of.query_heads, of.kv_heads, of.head_size, one.seq_lens,
            query.dtype, one.query_start_loc, True, of.sliding_window, of.isa, True,
        )  # fmt: skip
        ops.cpu_attn_reshape_and_cache(key, value, key_cache, value_cache, one.slot_mapping, of.isa)
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        ops.cpu_attention_with_kv_cache(
            query, key_cache, value_cache, output, one.query_start_loc, one.seq_lens, of.scale,
            True, None, of.sliding_window, one.block_table, of.softcap, metadata, None,
        )  # fmt: skip
        return output


class Pair:
    """Both ends of one ring in one process, the lender busy, so that it serves when polled."""

    def __init__(
        self, folder: Path, of: Geometry, server: AttentionServer | None = None, rows: Rows = PLAIN
    ) -> None:
        self.geometry = of
        self.memory = Memory(of)
        self.ring = LentRing.create(folder / f"ring{id(self)}", of, 256, 4, 3)
        self.ring.granted = BLOCKS
        self.server = server or AttentionServer()
        self.server.open(self.ring, self.memory.caches, rows=rows)
        self.server.busy()
        self.borrower = Borrower(Ring.attach(self.ring.path))

    def begin(self, one: Step) -> None:
        self.borrower.begin_step(
            one.query_start_loc, one.seq_lens, one.block_table, one.slot_mapping
        )

    def post(self, one: Step, layer: int = 0) -> None:
        self.borrower.post(layer, *one.of_layer(layer, self.geometry))

    def output(self, one: Step) -> Tensor:
        """As in vLLM, a part of a larger tensor."""
        tokens, width = len(one.slot_mapping), self.geometry.query_heads * self.geometry.head_size
        return torch.full((tokens + 2, width), 5.0, dtype=one.qkv.dtype)[1:-1]

    def attend(self, layer: int, one: Step) -> Tensor:
        self.post(one, layer)
        assert self.server.poll() == 1
        output = self.output(one)
        assert self.borrower.wait(output, PATIENCE_S)
        return output.view(len(output), -1, self.geometry.head_size)


@pytest.fixture
def shm() -> Iterator[Path]:
    folder = Path(f"/dev/shm/loomserve-test-{os.getpid()}-{time.monotonic_ns()}")
    folder.mkdir()
    yield folder
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


# Geometry


@given(
    st.builds(
        Geometry,
        layers=st.integers(1, 99),
        query_heads=st.integers(1, 8).map(lambda heads: 4 * heads),
        kv_heads=st.sampled_from((1, 2, 4)),
        head_size=st.integers(1, 512),
        block_size=st.integers(1, 512),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        scale=st.floats(allow_nan=False, allow_infinity=False),
        isa=st.text(max_size=8),
    )
)
def test_a_geometry_survives_its_journey(one: Geometry) -> None:
    assert Geometry.from_json(one.to_json()) == one


def test_a_block_of_a_layer_holds_keys_and_values_of_all_its_heads() -> None:
    assert GQA.layer_block_bytes == 2 * 3 * 32 * 64 * 4
    assert replace(GQA, dtype="bfloat16").layer_block_bytes == 2 * 3 * 32 * 64 * 2


@pytest.mark.parametrize("wrong", [{"dtype": "fp8"}, {"kv_heads": 2}, {"layers": 0}])
def test_an_impossible_geometry_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"geometry|cannot be lent"):
        replace(GQA, **wrong)  # type: ignore[arg-type]
    text = GQA.to_json().replace('"kv_heads":3', '"kv_heads":"three"')
    with pytest.raises(ValueError, match="kv_heads"):
        Geometry.from_json(text)


# The file


def test_who_attaches_sees_what_the_maker_and_all_others_write(tmp_path: Path) -> None:
    made = Ring.create(tmp_path / "ring", GQA, 100, 5, 7)
    seen = Ring.attach(tmp_path / "ring")
    assert seen.geometry == GQA
    assert (seen.max_tokens, seen.max_requests, seen.max_blocks) == (100, 5, 7)
    assert (seen.granted, seen.wanted, seen.vacated, seen.closed) == (0, 0, 0, Closed.OPEN)
    made.granted, made.wanted = 9, 8
    seen.vacated = 7
    assert (seen.granted, seen.wanted, made.vacated) == (9, 8, 7)
    assert seen.stats() == (0,) * 8
    for mine, other in zip(made.areas, seen.areas, strict=True):
        mine.view(-1)[-1] = 3
        assert other.view(-1)[-1] == 3
    assert [area.shape for area in seen.areas[1:5]] == [(6,), (5,), (5, 7), (100,)]
    assert seen.areas.output.shape == (100, 9, 64)


class Interrupted:
    """Control words, in whose access number ``at`` the other end does something."""

    def __init__(self, words: Any, at: int, act: Callable[[], object]) -> None:
        self._words, self._left, self._act = words, at, act

    def _pass(self) -> None:
        self._left -= 1
        if self._left == -1:
            self._act()

    def __getitem__(self, place: Any) -> Any:
        self._pass()
        return self._words[place]

    def __setitem__(self, place: Any, value: Any) -> None:
        self._pass()
        self._words[place] = value


@pytest.mark.parametrize("at", range(9))
@pytest.mark.parametrize("interrupted", ["borrower", "lender"])
def test_what_a_lender_has_just_granted_is_not_used_and_taken_back_at_once(
    tmp_path: Path, at: int, interrupted: str
) -> None:
    lender = Ring.create(tmp_path / "ring", GQA, 100, 5, 7)
    borrower = Ring.attach(tmp_path / "ring")
    borrower.vacated = 4
    lender.wanted = lender.granted = 8
    used = []

    def claim() -> None:
        used.append(borrower.claim())

    def take_back() -> None:
        if lender.recall(5):
            lender.granted = 5

    if interrupted == "borrower":
        borrower.words = cast("Any", Interrupted(borrower.words, at, take_back))
        claim()
    else:
        lender.words = cast("Any", Interrupted(lender.words, at, claim))
        take_back()
        claim()
    assert all(each <= lender.granted for each in used)
    take_back()
    assert used[-1] <= lender.granted, "the borrower has not left"
    borrower.vacated = borrower.claim()
    assert borrower.vacated == 5
    take_back()
    assert lender.granted == 5


def test_no_two_control_words_share_a_pair_of_cache_lines(tmp_path: Path) -> None:
    made = Ring.create(tmp_path / "ring", GQA, 1, 1, 1)
    assert made.areas.control.stride(0) * 8 == 128
    assert made.areas.control.data_ptr() % 128 == 0
    assert all(area.data_ptr() % 64 == 0 for area in made.areas)


def test_nobody_else_may_read_a_ring(tmp_path: Path) -> None:
    Ring.create(tmp_path / "ring", GQA, 1, 1, 1)
    assert (tmp_path / "ring").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["ring"]


def test_the_first_reason_to_close_a_ring_stays(tmp_path: Path) -> None:
    made = Ring.create(tmp_path / "ring", GQA, 1, 1, 1)
    Ring.attach(tmp_path / "ring").shut(Closed.REVOKED)
    made.shut(Closed.DRAINED)
    made.shut(Closed.OPEN)
    assert made.closed is Closed.REVOKED


def test_a_new_ring_replaces_one_that_others_keep(tmp_path: Path) -> None:
    old = Ring.create(tmp_path / "ring", GQA, 1, 1, 1)
    old.granted = 5
    assert Ring.create(tmp_path / "ring", MHA, 1, 1, 1).granted == 0
    assert Ring.attach(tmp_path / "ring").geometry == MHA
    old.unlink()
    old.unlink()
    assert old.granted == 5
    old.close()
    old.close()
    with pytest.raises(StartError, match="No such file"):
        Ring.attach(tmp_path / "ring")


def test_what_is_no_ring_of_this_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ring"
    path.write_bytes(b"letters" * 1000)
    with pytest.raises(StartError, match="is no task ring"):
        Ring.attach(path)
    Ring.create(path, GQA, 1, 1, 1)
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(StartError, match="cut short"):
        Ring.attach(path)
    Ring.create(path, GQA, 1, 1, 1)
    monkeypatch.setattr(ring, "VERSION", 3)
    with pytest.raises(StartError, match="has format 2, this Loomserve reads 3"):
        Ring.attach(path)


def test_a_ring_that_does_not_fit_into_memory_is_refused_and_leaves_nothing(
    shm: Path,
) -> None:
    with pytest.raises(StartError, match="lower max_num_batched_tokens"):
        Ring.create(shm / "ring", GQA, 2**40, 1, 1)
    assert list(shm.iterdir()) == []


# Tasks


@pytest.mark.parametrize("of", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rows", [PLAIN, ABREAST], ids=str)
@settings(max_examples=12, deadline=None)
@given(plan=st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_lender_computes_bit_for_bit_what_the_borrower_would(
    tmp_path_factory: pytest.TempPathFactory,
    of: Geometry,
    rows: Rows,
    plan: list[list[int]],
) -> None:
    """``plan`` says how many tokens each request gets in each step: prefills, decodes, mixed."""
    pair, local = Pair(tmp_path_factory.mktemp("ring"), of, rows=rows), Local(of)
    lens = [0] * 4
    for number, added in enumerate(plan):
        one = step(of, lens[: len(added)], added, seed=number)
        lens[: len(added)] = one.seq_lens.tolist()
        pair.begin(one)
        for layer in range(of.layers):
            assert torch.equal(pair.attend(layer, one), local.attend(layer, one))
    for layer, (key, value) in enumerate(pair.memory.caches):
        found = torch.cat((key, value), dim=2)[rows.of(torch.arange(BLOCKS))]
        assert torch.equal(found, local.cache[layer])
    assert (pair.memory.bytes[:, of.layers] == 7).all()
    assert pair.ring.stats().tasks == pair.ring.stats().polled == len(plan) * of.layers
    pair.server.stop()


# Copies


def blocks_of(one: Geometry, count: int) -> tuple[Tensor, Tensor]:
    shape = (2, count, one.kv_heads, one.block_size, one.head_size)
    key, value = torch.randn(shape).to(getattr(torch, one.dtype))
    return key, value


@pytest.mark.parametrize("of", GEOMETRIES[:3], ids=str)
@pytest.mark.parametrize("rows_of", [PLAIN, ABREAST], ids=str)
def test_blocks_are_copied_as_they_are_into_a_lender_and_back(
    tmp_path: Path, of: Geometry, rows_of: Rows
) -> None:
    pair = Pair(tmp_path, of, rows=rows_of)
    pair.server.idle()
    there = [rows_of.of(block) for block in (7, 2, 11)]
    rows = [blocks_of(of, 3) for _ in range(of.layers)]
    pair.borrower.begin_copy([7, 2, 11], RingTask.WRITE)
    for layer in range(of.layers):
        assert pair.borrower.write(layer, *rows[layer], PATIENCE_S)
    for (key, value), cache in zip(rows, pair.memory.caches, strict=True):
        assert torch.equal(cache[0][there], key)
        assert torch.equal(cache[1][there], value)
    untouched = [row for row in range(BLOCKS) if row not in there]
    assert not pair.memory.bytes[untouched, : of.layers].any()
    pair.borrower.begin_copy([11, 7], RingTask.READ)
    for layer, (key, value) in enumerate(rows):
        copied = pair.borrower.read(layer, PATIENCE_S)
        assert copied is not None
        assert torch.equal(copied[0], key[[2, 0]])
        assert torch.equal(copied[1], value[[2, 0]])
    assert pair.ring.stats() == (0,) * 8
    pair.server.stop()


def test_attention_goes_on_after_a_copy(tmp_path: Path) -> None:
    pair, local = Pair(tmp_path, GQA), Local(GQA)
    one = step(GQA, [0], [40])
    pair.begin(one)
    assert torch.equal(pair.attend(0, one), local.attend(0, one))
    pair.server.idle()
    pair.borrower.begin_copy([0, 1], RingTask.READ)
    copied = pair.borrower.read(0, PATIENCE_S)
    assert copied is not None
    rows = [each.clone() for each in copied]
    pair.borrower.begin_copy([5, 6], RingTask.WRITE)
    assert pair.borrower.write(0, *rows, PATIENCE_S)
    pair.server.busy()
    two = step(GQA, [40], [3], seed=1)
    expected = local.attend(0, two)
    two.block_table[0, :2] = torch.tensor([5, 6])
    two.slot_mapping += 5 * BLOCK
    pair.begin(two)
    assert torch.equal(pair.attend(0, two), expected)


@pytest.mark.parametrize(("word", "value"), [(1, 0), (1, 4), (1, -1), (3, 3), (3, -1)], ids=str)
def test_an_impossible_copy_is_refused(tmp_path: Path, word: int, value: int) -> None:
    pair = Pair(tmp_path, GQA)
    pair.borrower.begin_copy([0, 1, 2], RingTask.WRITE)
    pair.ring.words[ControlLine.STEP * LINE_WORDS + word] = value
    pair.server.idle()
    assert not pair.borrower.write(0, *blocks_of(GQA, 3), PATIENCE_S)
    assert pair.ring.closed is Closed.REFUSED
    assert not pair.memory.bytes[:, : GQA.layers].any()


@pytest.mark.parametrize("block", [-1, 4, BLOCKS])
def test_a_copy_of_blocks_that_are_not_granted_is_refused(tmp_path: Path, block: int) -> None:
    pair = Pair(tmp_path, GQA)
    pair.ring.granted = 4
    pair.borrower.begin_copy([0, block], RingTask.READ)
    pair.server.idle()
    assert pair.borrower.read(0, PATIENCE_S) is None
    assert pair.ring.closed is Closed.REFUSED


def test_more_blocks_than_a_ring_holds_are_not_copied_at_once(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    for blocks in ([], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="are not 1 to 3"):
            pair.borrower.begin_copy(blocks, RingTask.READ)


def test_rows_come_and_go_in_whatever_strides(tmp_path: Path) -> None:
    pair, local = Pair(tmp_path, GQA), Local(GQA)
    one = step(GQA, [0, 0], [3, 5])
    wide = torch.zeros(*one.qkv.shape[:3], 80)
    wide[..., :64] = one.qkv
    apart = replace(one, qkv=wide[..., :64])
    pair.begin(apart)
    expected = local.attend(0, one)
    assert torch.equal(pair.attend(0, apart), expected)
    pair.post(one, 1)
    pair.server.poll()
    output = torch.zeros(8, 12, 80)[:, 1:10, 4:68]
    assert pair.borrower.wait(output, PATIENCE_S)
    assert torch.equal(output, local.attend(1, one))


def test_what_stands_behind_a_sequences_last_block_is_not_looked_at(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [40])
    one.block_table[0, 2] = -1
    expected = Local(GQA).attend(0, one)
    pair.begin(one)
    assert torch.equal(pair.attend(0, one), expected)


def test_a_server_serves_several_rings_of_different_geometries(tmp_path: Path) -> None:
    server = AttentionServer()
    pairs = [Pair(tmp_path, of, server) for of in (GQA, MHA)]
    one = [step(pair.geometry, [0, 0], [4, 9]) for pair in pairs]
    for pair, its in zip(pairs, one, strict=True):
        pair.begin(its)
        pair.post(its)
    assert server.poll() == 2
    assert server.poll() == 0
    for pair, its in zip(pairs, one, strict=True):
        output = pair.output(its)
        assert pair.borrower.wait(output, PATIENCE_S)
        assert torch.equal(output.view(13, -1, 64), Local(pair.geometry).attend(0, its))
    assert server.dead() == []


def corrupt(name: str, at: int | tuple[int, int], value: int) -> Callable[[Step], None]:
    def apply(one: Step) -> None:
        getattr(one, name)[at] = value

    return apply


@pytest.mark.parametrize(
    "spoil",
    [
        corrupt("block_table", (0, 0), BLOCKS - 2),
        corrupt("block_table", (1, 1), -1),
        corrupt("block_table", (1, 1), 2**31 - 1),
        corrupt("slot_mapping", 3, (BLOCKS - 2) * BLOCK),
        corrupt("slot_mapping", 3, 2**62),
        corrupt("slot_mapping", 0, -1),
        corrupt("query_start_loc", 0, 1),
        corrupt("query_start_loc", 1, 0),
        corrupt("query_start_loc", 1, 60),
        corrupt("query_start_loc", 2, 45),
        corrupt("query_start_loc", 2, 2**31 - 1),
        corrupt("seq_lens", 1, 39),
        corrupt("seq_lens", 0, -(2**31)),
        corrupt("seq_lens", 0, 3 * BLOCK + 1),
        corrupt("seq_lens", 0, 2**31 - 1),
    ],
)
@pytest.mark.parametrize("rows", [PLAIN, ABREAST], ids=str)
def test_a_task_on_what_is_not_the_borrowers_is_refused_before_memory_is_touched(
    tmp_path: Path, spoil: Callable[[Step], None], rows: Rows
) -> None:
    pair = Pair(tmp_path, GQA, rows=rows)
    pair.ring.granted = BLOCKS - 2
    before = pair.memory.bytes.clone()
    one = step(GQA, [0, 0], [4, 40])
    spoil(one)
    pair.begin(one)
    pair.post(one)
    assert pair.server.poll() == 0
    output = pair.output(one)
    assert not pair.borrower.wait(output, PATIENCE_S)
    assert (output == 5).all()
    assert pair.ring.closed is Closed.REFUSED
    assert torch.equal(pair.memory.bytes, before)
    assert pair.server.dead() == [pair.ring]


@pytest.mark.parametrize("layer", [-1, 2, 2**62])
def test_a_layer_that_the_guest_does_not_have_is_refused(tmp_path: Path, layer: int) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.borrower.post(layer, *one.of_layer(0, GQA))
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED


@pytest.mark.parametrize(("word", "value"), [(1, 0), (1, 5), (2, 0), (2, 257), (2, -1)])
def test_a_step_of_impossible_size_is_refused(tmp_path: Path, word: int, value: int) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    pair.ring.words[ControlLine.STEP * LINE_WORDS + word] = value
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED


def test_a_task_out_of_turn_is_refused(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    pair.ring.words[ControlLine.POSTED * LINE_WORDS] += 1
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED


def test_a_grant_that_shrinks_counts_from_the_next_layer_on(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0, 0], [4, 40])
    pair.begin(one)
    pair.attend(0, one)
    pair.ring.granted = 4
    pair.post(one, 1)
    assert pair.server.poll() == 0
    assert pair.ring.closed is Closed.REFUSED


def test_an_error_of_the_kernel_closes_the_ring(tmp_path: Path) -> None:
    pair = Pair(tmp_path, replace(GQA, isa="abacus"))
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    assert pair.server.poll() == 0
    assert not pair.borrower.wait(pair.output(one), PATIENCE_S)
    assert pair.ring.closed is Closed.FAILED


def test_a_closed_ring_takes_no_task_and_its_lender_serves_none(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    pair.ring.shut(Closed.REVOKED)
    assert pair.server.poll() == 0
    for _ in range(2):
        assert not pair.borrower.wait(pair.output(one), PATIENCE_S)
        pair.begin(one)
        pair.post(one)
    assert pair.ring.stats().tasks == 1
    assert not pair.memory.bytes[:, : GQA.layers].any()


def test_a_server_that_gave_a_ring_up_does_not_touch_memory_for_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    pair.post(one)
    pair.server.close(pair.ring)
    assert pair.server.poll() == 0
    pair.server.idle()
    assert not pair.borrower.wait(pair.output(one), 0.05)
    assert pair.ring.closed is Closed.TIMED_OUT
    assert not pair.memory.bytes[:, : GQA.layers].any()


def test_a_borrower_keeps_to_the_protocol(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one, large = step(GQA, [0], [4]), step(GQA, [0] * 5, [1] * 5)
    with pytest.raises(ValueError, match="5 requests"):
        pair.begin(large)
    pair.begin(one)
    with pytest.raises(RuntimeError, match="tokens in a step of 4"):
        pair.borrower.post(0, *(rows[:3] for rows in one.of_layer(0, GQA)))
    pair.post(one)
    with pytest.raises(RuntimeError, match="in flight"):
        pair.post(one)
    with pytest.raises(RuntimeError, match="in flight"):
        pair.begin(one)
    assert pair.server.poll() == 1
    assert pair.borrower.wait(pair.output(one), PATIENCE_S)


def test_caches_of_another_geometry_are_refused(tmp_path: Path) -> None:
    made, server = LentRing.create(tmp_path / "ring", GQA, 1, 1, 1), AttentionServer()
    fitting = Memory(GQA).caches
    for caches in (
        fitting[:1],
        Memory(MHA).caches,
        Memory(replace(GQA, dtype="bfloat16")).caches,
        [(key, value.clone()) for key, value in fitting],
        [fitting[0], (fitting[1][0][1:], fitting[1][1][1:])],
    ):
        with pytest.raises(ValueError, match="KV caches of"):
            server.open(made, caches)
    assert made.pid(ControlLine.LENDER) == 0


def test_the_native_ring_refuses_memory_that_is_not_the_cpus(tmp_path: Path) -> None:
    # torch's meta tensors have, as a GPU's, no memory here: a copy would end the process.
    pair, one = Pair(tmp_path, GQA), step(GQA, [0], [4])
    pair.begin(one)
    for far in range(3):
        rows = list(one.of_layer(0, GQA))
        rows[far] = rows[far].to("meta")
        with pytest.raises(RuntimeError, match="a task's tensor on meta cannot be lent"):
            pair.borrower.post(0, *rows)
    pair.post(one)
    assert pair.server.poll() == 1
    with pytest.raises(RuntimeError, match="a task's tensor on meta cannot be lent"):
        pair.borrower.wait(pair.output(one).to("meta"), PATIENCE_S)
    elsewhere = [(key.to("meta"), value.to("meta")) for key, value in pair.memory.caches]
    made = LentRing.create(tmp_path / "ring", GQA, 1, 1, 1)
    with pytest.raises(RuntimeError, match="a KV cache on meta cannot be lent"):
        AttentionServer().open(made, elsewhere)
    areas = made.areas
    with pytest.raises(RuntimeError, match="a ring's rows on meta cannot be lent"):
        native.load().Ring(*areas._replace(query=areas.query.to("meta")))


def test_all_that_happens_is_counted(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    begin = time.monotonic_ns()
    one = step(GQA, [0], [4])
    pair.begin(one)
    for layer in range(GQA.layers):
        pair.attend(layer, one)
    took, stats = time.monotonic_ns() - begin, pair.ring.stats()
    assert (stats.tasks, stats.polled, stats.idled) == (2, 2, 0)
    assert 0 < stats.wait_max_ns < stats.wait_ns
    # A task is waiting to be picked up while it is still being posted.
    assert max(stats.post_ns, stats.pickup_ns) + stats.wait_ns + stats.service_ns < took
    assert min(stats[1:4]) > 0
    assert min(stats[6:]) > 0
    for side in (ControlLine.BORROWER, ControlLine.LENDER):
        assert pair.ring.pid(side) == os.getpid()


# The idle thread


def in_turn(pair: Pair, one: Step, tasks: int) -> None:
    for _ in range(tasks):
        pair.post(one)
        assert pair.borrower.wait(pair.output(one), PATIENCE_S)


def test_while_no_step_runs_the_server_serves_by_itself(tmp_path: Path) -> None:
    pair, local = Pair(tmp_path, GQA), Local(GQA)
    one = step(GQA, [0, 0], [4, 9])
    pair.begin(one)
    pair.server.idle()
    pair.post(one)
    output = pair.output(one)
    assert pair.borrower.wait(output, PATIENCE_S)
    assert torch.equal(output.view(13, -1, 64), local.attend(0, one))
    assert (pair.ring.stats().polled, pair.ring.stats().idled) == (0, 1)
    pair.server.stop()
    pair.post(one)
    assert not pair.borrower.wait(output, 0.05)


def test_while_a_step_runs_tasks_wait_for_its_polls(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    for _ in range(3):
        pair.server.idle()
        in_turn(pair, one, 2)
        pair.server.busy()
        pair.post(one)
        time.sleep(0.02)
        assert pair.server.poll() == 1
        assert pair.borrower.wait(pair.output(one), PATIENCE_S)
    assert (pair.ring.stats().polled, pair.ring.stats().idled) == (3, 6)


@pytest.mark.parametrize("rings", [1, 2])
def test_a_post_wakes_a_server_that_sleeps(tmp_path: Path, rings: int) -> None:
    server = AttentionServer(spin_s=0)
    pairs = [Pair(tmp_path, GQA, server) for _ in range(rings)]
    one = step(GQA, [0], [4])
    server.idle()
    for pair in pairs:
        pair.begin(one)
    waits = []
    for _ in range(9):
        time.sleep(0.01)
        for pair in pairs:
            begin = time.monotonic()
            in_turn(pair, one, 1)
            waits.append(time.monotonic() - begin)
        # And after a step, before which it slept.
        server.busy()
        server.idle()
    # A sleep lasts 0.1 s where nothing ends it.
    assert statistics.median(waits) < 0.05
    server.stop()


def test_the_server_serves_whatever_its_engine_does_meanwhile(tmp_path: Path) -> None:
    pair = Pair(tmp_path, GQA)
    one = step(GQA, [0], [4])
    pair.begin(one)
    over = threading.Event()

    def engine() -> None:
        while not over.is_set():
            pair.server.busy()
            for _ in range(3):
                pair.server.poll()
            pair.server.idle()
            time.sleep(0)

    thread = threading.Thread(target=engine)
    thread.start()
    in_turn(pair, one, 300)
    over.set()
    thread.join()
    stats = pair.ring.stats()
    assert stats.polled + stats.idled == stats.tasks == 300


# The native module


def test_of_all_who_need_the_module_one_builds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load()
    made, builds = native.target(), []

    def build(path: Path) -> None:
        builds.append(path)
        time.sleep(0.1)
        shutil.copy(made, path)

    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_build", build)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: native.load(), range(4)))
    assert builds == [native.target()]
    assert native.target().is_relative_to(tmp_path)


def test_a_module_that_the_environment_brings_along_is_not_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.load()
    made = native.target()
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(native, "_build", lambda path: shutil.copy(made, path))
    assert native.target().is_relative_to(tmp_path / "home")
    brought = tmp_path / "share/loomserve/native" / made.parent.name / made.name
    brought.parent.mkdir(parents=True)
    shutil.copy(made, brought)
    native.load()
    assert native.target() == brought
    assert not (tmp_path / "home").exists()


def test_a_changed_source_is_another_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = native.target()
    changed = tmp_path / "ring.cpp"
    changed.write_bytes(native.SOURCE.read_bytes() + b"\n")
    monkeypatch.setattr(native, "SOURCE", changed)
    assert native.target() != before


def test_without_a_compiler_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    # What a build that failed or was killed leaves does not stop the next.
    for _ in range(2):
        with pytest.raises(StartError, match="install a C\\+\\+20 compiler"):
            native.load()


# Processes that die


def serve(path: Path, idle: bool, ready: Connection) -> None:
    """A lender's process: by its idle thread, or polling without end."""
    torch.set_num_threads(1)
    mine, server = LentRing.attach(path), AttentionServer()
    server.open(mine, Memory(mine.geometry).caches)
    if not idle:
        server.busy()
    ready.send(None)
    while not idle:
        server.poll()
    time.sleep(3600)


def borrow(path: Path, ready: Connection) -> None:
    """A borrower's process: task after task."""
    torch.set_num_threads(1)
    borrower = Borrower(Ring.attach(path))
    one = step(GQA, [0], [4])
    output = torch.empty(4, GQA.query_heads, GQA.head_size)
    borrower.begin_step(one.query_start_loc, one.seq_lens, one.block_table, one.slot_mapping)
    ready.send(None)
    while True:
        borrower.post(0, *one.of_layer(0, GQA))
        borrower.wait(output, PATIENCE_S)


PROCESSES = mp.get_context("forkserver")
# So that vLLM and this module are imported once for all of them.
PROCESSES.set_forkserver_preload(["vllm._custom_ops", __name__])


@contextmanager
def started(target: Callable[..., None], *arguments: object) -> Iterator[BaseProcess]:
    mine, its = PROCESSES.Pipe()
    process = PROCESSES.Process(target=target, args=(*arguments, its))
    process.start()
    try:
        assert mine.poll(120), "the process did not start"
        mine.recv()
        yield process
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("idle", [True, False])
def test_a_borrower_outlives_its_lender(shm: Path, idle: bool) -> None:
    made = LentRing.create(shm / "ring", GQA, 256, 4, 3)
    made.granted = BLOCKS
    one = step(GQA, [0], [4])
    output = torch.zeros(4, 9 * 64)
    with started(serve, made.path, idle) as lender:
        borrower = Borrower(Ring.attach(made.path))
        borrower.begin_step(one.query_start_loc, one.seq_lens, one.block_table, one.slot_mapping)
        for _ in range(50):
            borrower.post(0, *one.of_layer(0, GQA))
            assert borrower.wait(output, PATIENCE_S)
        lender.kill()
        for _ in range(2):
            borrower.post(0, *one.of_layer(0, GQA))
            # A task that it took before it died may still come.
            if not borrower.wait(output, PATIENCE_S):
                break
    assert made.closed is Closed.DIED


def test_a_wait_for_a_lender_that_is_stopped_ends_in_time(shm: Path) -> None:
    made = LentRing.create(shm / "ring", GQA, 256, 4, 3)
    made.granted = BLOCKS
    one = step(GQA, [0], [4])
    output = torch.zeros(4, 9, 64)
    with started(serve, made.path, True) as lender:
        borrower = Borrower(Ring.attach(made.path))
        borrower.begin_step(one.query_start_loc, one.seq_lens, one.block_table, one.slot_mapping)
        assert lender.pid is not None
        stop(lender.pid)
        begin = time.monotonic()
        borrower.post(0, *one.of_layer(0, GQA))
        assert not borrower.wait(output, 0.2)
        assert made.closed is Closed.TIMED_OUT
        assert 0.2 <= time.monotonic() - begin < PATIENCE_S
        output.fill_(5)
        os.kill(lender.pid, signal.SIGCONT)
        assert not borrower.wait(output, PATIENCE_S)
        assert (output == 5).all()


@pytest.mark.parametrize("idle", [True, False])
def test_a_lender_notices_that_its_borrower_died(shm: Path, idle: bool) -> None:
    made = LentRing.create(shm / "ring", GQA, 256, 4, 3)
    made.granted = BLOCKS
    server = AttentionServer()
    server.open(made, Memory(GQA).caches)
    with started(borrow, made.path) as borrower:
        while made.stats().idled < 50:
            time.sleep(0.01)
        if not idle:
            server.busy()
        assert server.dead() == []
        borrower.kill()
        borrower.join()
        until = time.monotonic() + PATIENCE_S
        while not server.dead() and time.monotonic() < until:
            time.sleep(0.01)
            if not idle:
                server.busy()
    assert server.dead() == [made]
    assert made.closed is Closed.DIED
    server.stop()
