"""What tests do in processes whose kernels are interpreted, one for each end of a loan.

The interpreter is one thread's at a time, so a lender's thread has it for itself.
"""

from __future__ import annotations

import mmap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from triton.runtime.interpreter import InterpretedFunction

from loomserve.platform.base.errors import StartError
from loomserve.platform.lending.cuda.kernel import INTERPRETED
from loomserve.platform.lending.device.server import kernel_leaf
from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.block_partitions import Partitions
from loomserve.platform.lending.engine.borrower_worker import BorrowerWorker, StepLimits
from loomserve.platform.lending.engine.lender_worker import LenderWorker
from loomserve.platform.lending.engine.memory.mapped import MappedMemory
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.ring.geometry import GPU, Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.words import Closed
from tests.unit.platform.lending.device.two_devices import TwoDevices, queued

OWN_BLOCKS, LENT_BLOCKS, LENDER = 4, 6, 1
GEOMETRY = Geometry(
    layers=2, query_heads=4, kv_heads=2, head_size=16, block_size=16, dtype="float32",
    scale=0.25, isa=GPU,
)  # fmt: skip
LIMITS = StepLimits(max_tokens=32, max_requests=4, max_blocks=8)
PATIENCE_S = 60.0


class Borrower:
    """A borrower's end, as its worker has it on a GPU."""

    def __init__(self, folder: str) -> None:
        assert INTERPRETED
        torch.manual_seed(3)
        self.path, self.kv = f"{folder}/ring", local_kv(OWN_BLOCKS, GEOMETRY)
        partitions = Partitions([0, OWN_BLOCKS], OWN_BLOCKS + LENT_BLOCKS)
        self.context = LendingContext(PATIENCE_S, partitions)
        self.worker = BorrowerWorker(self.context, self.kv, LIMITS, kernel_leaf(TwoDevices()))

    def attend(self, layer: int, blocks: list[int], tokens: int) -> torch.Tensor:
        """Post one token behind so many others, and return its attention."""
        end = self.context.borrowers[LENDER]
        last = blocks[tokens // GEOMETRY.block_size] * GEOMETRY.block_size
        end.begin_step(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([tokens + 1], dtype=torch.int32),
            torch.tensor([blocks], dtype=torch.int32),
            torch.tensor([last + tokens % GEOMETRY.block_size]),
        )
        shape = (1, GEOMETRY.kv_heads, GEOMETRY.head_size)
        query = torch.randn(1, GEOMETRY.query_heads, GEOMETRY.head_size)
        self.row = query, torch.randn(shape), torch.randn(shape)
        end.post(layer, *self.row)
        output = torch.full_like(query, torch.nan)
        end.wait(output.view(1, -1), PATIENCE_S)
        return output

    def at_home(self, layer: int, blocks: list[int], tokens: int) -> torch.Tensor:
        """Attention of the last posted row over own blocks, and over its own key and value."""
        query, key, value = self.row
        there = torch.cat([self.kv.caches[layer][block] for block in blocks], dim=1)[:, :tokens]
        keys, values = (
            torch.cat([part, own.transpose(0, 1)], dim=1).repeat_interleave(2, 0)
            for part, own in zip(there.split(GEOMETRY.head_size, dim=2), (key, value), strict=True)
        )
        logits = torch.einsum("hd,htd->ht", query[0], keys) * GEOMETRY.scale
        return torch.einsum("ht,htd->hd", logits.softmax(-1), values)


class Lender:
    """A lender's end, and that of its scheduler."""

    def __init__(self, folder: str, geometry: Geometry, form: str, heads_apart: bool) -> None:
        assert INTERPRETED
        self.path, self.kv = f"{folder}/ring", local_kv(LENT_BLOCKS, geometry, heads_apart)
        self.server = kernel_leaf(TwoDevices(), resident=form == "resident").server()
        self.context = LendingContext()
        self.worker = LenderWorker(self.context, self.server, self.kv, nn.Module())
        self.worker.look_for_tasks("steps")

    def lend(self, granted: int, asked: dict[str, Any]) -> None:
        self.worker.lend(self.path, 0, LENT_BLOCKS, asked)
        self.scheduler = LentRing.attach(Path(self.path))
        self.scheduler.granted = granted

    def holds(self, block: int) -> bool:
        return any(bool(cache[block].any()) for cache in self.kv.caches)


def local_kv(blocks: int, geometry: Geometry, heads_apart: bool = False) -> LocalKv:
    inner = (geometry.block_size, 2 * geometry.head_size)
    if heads_apart:
        caches = torch.randn(geometry.layers, geometry.kv_heads, blocks, *inner).transpose(1, 2)
    else:
        caches = torch.randn(geometry.layers, blocks, geometry.kv_heads, *inner)
    memory = MappedMemory(mmap.PAGESIZE, torch.device("cpu"))
    return LocalKv([], list(caches), memory, blocks, geometry)


# Of both processes

Variant = tuple[str, tuple[Any, ...]]
"""A kernel's name, and what of its arguments Triton compiles another one for."""
_compiled: set[Variant] = set()
_launched: set[Variant] = set()

if INTERPRETED:
    _run = InterpretedFunction.run

    def note(function: Any, *given: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        named_all = dict(zip(function.arg_names, given, strict=False)) | named
        fixed = function.kwargs.get("do_not_specialize") or ()
        constants = function.fn.__annotations__
        traits = tuple(
            "any" if name in fixed else traits_of(value, "constexpr" in str(constants.get(name)))
            for name, value in sorted(named_all.items())
        )
        (_compiled if warmup else _launched).add((function.fn.__name__, traits))
        with queued():
            return _run(function, *given, grid=grid, warmup=warmup, **named)

    InterpretedFunction.run = note


def traits_of(value: Any, constant: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, tuple) and not constant:
        return tuple(traits_of(each, constant) for each in value)
    if isinstance(value, int) and not constant:
        return value == 1, value % 16 == 0
    return value


def launched() -> tuple[set[str], set[str]]:
    """Names of kernels, and of those that were not compiled for such arguments before."""
    names = {name for name, _ in _launched}, {name for name, _ in _launched - _compiled}
    _compiled.clear()
    _launched.clear()
    return names


# Of the borrower's process

_borrowers: list[Borrower] = []


def asks(folder: str) -> dict[str, Any]:
    _borrowers.append(Borrower(folder))
    return _borrowers[-1].worker.requirements()


def borrows() -> str:
    """Attach; returns the error."""
    borrower = _borrowers[-1]
    try:
        borrower.worker.borrow(LENDER, borrower.path)
    except StartError as error:
        return str(error)
    return ""


def moves(source: int, target: int, pairs: list[tuple[int, int]]) -> bool:
    return _borrowers[-1].worker.move_blocks(source, target, pairs)


def how_far_apart(there: list[int], home: list[int], tokens: int) -> float:
    """Attend with the lender's blocks, and with the own ones that were moved there."""
    borrower = _borrowers[-1]
    output = borrower.attend(1, there, tokens)
    return float((output[0] - borrower.at_home(1, home, tokens)).abs().max())


def answer(blocks: list[int], tokens: int) -> tuple[bool, Closed]:
    """Whether anything came, and why the ring is closed."""
    borrower = _borrowers[-1]
    output = borrower.attend(0, blocks, tokens)
    return bool(output.any()), borrower.context.borrowers[LENDER].ring.closed


def mixes() -> str:
    """Write a step's slots as torch would; returns the error."""
    borrower = _borrowers[-1]
    buffer = borrower.context.borrowers[LENDER]._device._buffer  # type: ignore[attr-defined]
    try:
        buffer.slots[:1] = torch.tensor([1])
    except AssertionError as error:
        return str(error)
    return ""


def are_equal(one: int, other: int) -> bool:
    return all(bool((cache[one] == cache[other]).all()) for cache in _borrowers[-1].kv.caches)


# Of the lender's process

_lenders: list[Lender] = []


def lends(folder: str, asked: dict[str, Any], granted: int, form: str, **change: Any) -> str:
    """Lend to a borrower of GEOMETRY, or of another, from that or ``own``; returns the error."""
    own, heads_apart = replace(GEOMETRY, **change.pop("own", {})), change.pop("heads_apart", False)
    _lenders.append(lender := Lender(folder, own, form, heads_apart))
    asked["geometry"] = replace(GEOMETRY, **change).to_json()
    try:
        lender.lend(granted, asked)
    except ValueError as error:
        return str(error)
    return ""


def has_only_a_ring(folder: str) -> None:
    LentRing.create(Path(folder, "ring"), GEOMETRY, 1, 1, 1)


def counted() -> tuple[int, int]:
    """Tasks, as the borrower and the lender counted them; a kernel that stays counts at its end."""
    end = time.monotonic() + PATIENCE_S
    while True:
        stats = _lenders[-1].scheduler.stats()
        served = stats.polled + stats.idled
        if served >= stats.tasks or time.monotonic() > end:
            return stats.tasks, served
        time.sleep(0.01)


def is_dead() -> bool:
    return len(_lenders[-1].server.dead()) == 1


def takes_back(block: int) -> tuple[bool, bool]:
    """Grant none from this block on, and begin a step: whether anything was in it, and is."""
    lender = _lenders[-1]
    there = lender.holds(block)
    lender.scheduler.granted = block
    lender.server.busy()
    return there, lender.holds(block)


def ends(folder: str) -> tuple[bool, list[str]]:
    """End the loan: whether anything is left in its blocks, and which files are."""
    lender = _lenders[-1]
    lender.worker.end_lending(lender.path)
    lender.server.stop()
    left = [each.name for each in Path(folder).iterdir()]
    return any(lender.holds(block) for block in range(LENT_BLOCKS)), left
