"""Arms under memory pressure: whose memory is the same, and which part of the gain each shows."""

from __future__ import annotations

import pytest

from benchmarks.adaptive_arms import (
    ARMS,
    BLOCKS,
    STOCK,
    USUAL_ARMS,
    blocks_of,
    memory_bytes,
    store_bytes,
)
from benchmarks.engine import BLOCK_BYTES


@pytest.mark.parametrize("swap_tokens", [128, 1024, 4096])
def test_one_arm_of_stock_vllm_has_all_memory_of_the_others(swap_tokens: int) -> None:
    ours = {memory_bytes(arm, swap_tokens) for arm in ARMS.keys() - STOCK.keys()}
    assert len(ours) == 1
    lacking = ours.pop() - memory_bytes("recompute_all_memory", swap_tokens)
    # Less than a block of the store's least memory.
    assert 0 <= lacking < BLOCK_BYTES


def test_all_others_have_the_same_kv_memory() -> None:
    assert {blocks_of(arm, 1024) for arm in ARMS if arm != "recompute_all_memory"} == {BLOCKS}
    assert blocks_of("recompute_all_memory", 1024) == BLOCKS + store_bytes(1024) // BLOCK_BYTES


def test_the_parts_of_adaptive_are_reported_by_default() -> None:
    assert {*STOCK, "swap", "adaptive", "adaptive_fcfs", "without_predictions"} <= {*USUAL_ARMS}
    adaptive = ARMS["adaptive"]
    assert adaptive is not None
    for arm, changed in (
        ("adaptive_fcfs", {"queue": "fcfs"}),
        ("without_peak_admission", {"peak_admission": False}),
        ("without_predictions", {}),
    ):
        assert ARMS[arm] == {**adaptive, **changed}
