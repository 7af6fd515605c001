"""Loans that kernels carry: interpreted, between two processes that map the same memory."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton, which interprets the kernels, is not installed")

from loomserve.platform.lending.engine.block_partitions import OWN
from loomserve.platform.lending.ring.words import Closed
from tests.unit.platform.lending.device import interpreted
from tests.unit.platform.lending.device.interpreted import GEOMETRY, LENDER, LENT_BLOCKS, OWN_BLOCKS

pytestmark = [pytest.mark.heavy, pytest.mark.xdist_group("interpreted kernels")]


class Ends:
    """The two processes."""

    def __init__(self) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self._borrower, self._lender = (ProcessPoolExecutor(1, context) for _ in range(2))
        for pool in (self._borrower, self._lender):
            # The process is made with its first call.
            pool.submit(int).result()

    def borrower(self, function: Any, *arguments: Any) -> Any:
        return self._borrower.submit(function, *arguments).result()

    def lender(self, function: Any, *arguments: Any, **named: Any) -> Any:
        return self._lender.submit(function, *arguments, **named).result()

    def open(
        self, folder: Path, granted: int = LENT_BLOCKS, form: str = "stream", **lender: Any
    ) -> None:
        asked = self.borrower(interpreted.asks, str(folder))
        assert self.lender(interpreted.lends, str(folder), asked, granted, form, **lender) == ""
        assert self.borrower(interpreted.borrows) == ""

    def end(self) -> None:
        self._borrower.shutdown()
        self._lender.shutdown()


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        both = Ends()
        yield both
        both.end()


@pytest.mark.parametrize("form", ["stream", "resident"])
def test_blocks_that_moved_are_attended_to_and_come_back(
    ends: Ends, tmp_path: Path, form: str
) -> None:
    ends.open(tmp_path, form=form)
    pairs = [(0, OWN_BLOCKS + 2), (1, OWN_BLOCKS)]
    assert ends.borrower(interpreted.moves, OWN, LENDER, pairs)
    tokens = GEOMETRY.block_size + 5
    assert ends.borrower(interpreted.how_far_apart, [2, 0], [0, 1], tokens) < 2e-6
    assert ends.lender(interpreted.counted) == (1, 1)
    assert ends.borrower(interpreted.moves, LENDER, OWN, [(OWN_BLOCKS + 2, 3)])
    assert ends.borrower(interpreted.are_equal, 0, 3)
    assert ends.lender(interpreted.ends, str(tmp_path)) == (False, [])


@pytest.mark.parametrize("form", ["stream", "resident"])
@pytest.mark.parametrize(
    ("abreast", "lender"),
    [
        (2, {"own": {"layers": 4}}),
        (1, {"heads_apart": True}),
        (3, {"own": {"query_heads": 6, "kv_heads": 6}, "heads_apart": True}),
    ],
)
def test_blocks_that_lie_abreast_at_a_lender_of_another_shape_are_attended_to(
    ends: Ends, tmp_path: Path, form: str, abreast: int, lender: dict[str, Any]
) -> None:
    granted = abreast * LENT_BLOCKS
    ends.open(tmp_path, granted, form, **lender)
    first, last = granted - 1, granted - 2
    pairs = [(0, OWN_BLOCKS + first), (1, OWN_BLOCKS + last), (2, OWN_BLOCKS)]
    assert ends.borrower(interpreted.moves, OWN, LENDER, pairs)
    tokens = GEOMETRY.block_size + 5
    assert ends.borrower(interpreted.how_far_apart, [first, last], [0, 1], tokens) < 2e-6
    assert ends.lender(interpreted.counted) == (1, 1)
    assert ends.borrower(interpreted.moves, LENDER, OWN, [(OWN_BLOCKS, 3)])
    assert ends.borrower(interpreted.are_equal, 2, 3)
    # None behind what is granted.
    assert ends.borrower(interpreted.answer, [granted, first], 0) == (False, Closed.REFUSED)
    assert ends.lender(interpreted.ends, str(tmp_path)) == (False, [])


@pytest.mark.parametrize("form", ["stream", "resident"])
def test_no_task_waits_for_a_kernel_to_be_compiled(ends: Ends, tmp_path: Path, form: str) -> None:
    for end in (ends.borrower, ends.lender):
        end(interpreted.launched)
    ends.open(tmp_path, form=form)
    assert ends.borrower(interpreted.answer, [1, 2], 20) == (True, Closed.OPEN)
    ends.lender(interpreted.counted)
    ends.lender(interpreted.ends, str(tmp_path))
    of_borrower = {"describe_rows", "post_rows", "wait_for_answer", "fetch_rows"}
    assert ends.borrower(interpreted.launched) == (of_borrower, set())
    of_lender = {"poll_task", "write_rows", "attend_rows"} if form == "stream" else {"serve_tasks"}
    assert ends.lender(interpreted.launched) == (of_lender, set())


def test_what_torch_does_with_two_devices_memory_at_once_is_noticed(
    ends: Ends, tmp_path: Path
) -> None:
    ends.open(tmp_path)
    assert "aten.copy_.default: memory of two devices" in ends.borrower(interpreted.mixes)
    ends.lender(interpreted.ends, str(tmp_path))


def test_blocks_that_are_not_granted_close_the_loan(ends: Ends, tmp_path: Path) -> None:
    ends.open(tmp_path, granted=2)
    tokens = GEOMETRY.block_size + 1
    assert ends.borrower(interpreted.answer, [1, 2], tokens) == (False, Closed.REFUSED)
    assert ends.lender(interpreted.is_dead)
    ends.lender(interpreted.ends, str(tmp_path))


def test_memory_that_is_wanted_back_is_cleared_before_a_step(ends: Ends, tmp_path: Path) -> None:
    ends.open(tmp_path)
    assert ends.borrower(interpreted.moves, OWN, LENDER, [(0, OWN_BLOCKS + 5)])
    assert ends.lender(interpreted.takes_back, 5) == (True, False)
    # What kernels wrote, too.
    assert ends.borrower(interpreted.answer, [4], 0) == (True, Closed.OPEN)
    assert ends.lender(interpreted.takes_back, 4) == (True, False)
    ends.lender(interpreted.ends, str(tmp_path))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"isa": "vec"}, "a GPU's engine and a CPU's lend nothing to each other"),
        ({"sliding_window": 8}, "compute neither sliding windows nor soft caps"),
        ({"block_size": 24}, "a block of 24 tokens is no power of two"),
        ({"own": {"layers": 1}, "heads_apart": True}, "and no more heads or layers than its own"),
        ({"own": {"head_size": 8}, "heads_apart": True}, "blocks and heads of the same size alone"),
    ],
)
def test_what_kernels_cannot_carry_is_refused(
    ends: Ends, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    asked = ends.borrower(interpreted.asks, str(tmp_path))
    assert said in ends.lender(interpreted.lends, str(tmp_path), asked, 1, "stream", **change)


def test_a_ring_without_memory_for_kernels_is_not_attached_to(ends: Ends, tmp_path: Path) -> None:
    ends.borrower(interpreted.asks, str(tmp_path))
    ends.lender(interpreted.has_only_a_ring, str(tmp_path))
    assert "has no memory for kernels" in ends.borrower(interpreted.borrows)
