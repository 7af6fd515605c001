"""Arms of :mod:`benchmarks.adaptive`: what schedulers are told, and how much memory there is.

Schedulers that swap have a store beside their KV memory. So there are two arms of stock vLLM, one
with the same KV memory as theirs, as in AdaptiveLLM, and one with as much memory in all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.engine import BLOCK_BYTES, BLOCK_TOKENS

BLOCKS = 2048 // BLOCK_TOKENS
"""KV memory of each engine, but for stock vLLM with all memory."""
_LEAST_STORE_BYTES = 2**25
_ADAPTIVE = {"preemption": "adaptive", "queue": "fair"}
SWITCHES = (
    "deadlines", "overlap_swap", "prefetch_swap_in", "chunked_recompute", "peak_admission",
)  # fmt: skip
STOCK = {"recompute": False, "recompute_all_memory": True}
"""Arms of stock vLLM, and whether the memory of the others' store is its KV memory."""
ARMS: Mapping[str, Mapping[str, Any] | None] = {
    **dict.fromkeys(STOCK),
    "swap": {
        "preemption": "swap",
        "queue": "fcfs",
        "overlap_swap": False,
        "prefetch_swap_in": False,
    },
    "adaptive": _ADAPTIVE,
    "adaptive_fcfs": {"preemption": "adaptive", "queue": "fcfs"},
    **{f"without_{switch}": {**_ADAPTIVE, switch: False} for switch in SWITCHES},
    "without_predictions": _ADAPTIVE,
}
"""What the scheduler is told; nothing for stock vLLM."""
USUAL_ARMS = (
    *STOCK, "swap", "adaptive", "adaptive_fcfs", "without_predictions", "without_peak_admission",
)  # fmt: skip
"""Order, predictions and admission apart, beside what they are together."""


def kv_bytes(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS) * BLOCK_BYTES


def store_bytes(swap_tokens: int) -> int:
    """Of the store behind schedulers that swap.

    Half of it is swap space, as in the platform unless it is told otherwise, and no less of it than
    a store can be.
    """
    return max(2 * kv_bytes(swap_tokens), _LEAST_STORE_BYTES)


def blocks_of(arm: str, swap_tokens: int) -> int:
    """KV memory of the arm's engine."""
    return BLOCKS + (store_bytes(swap_tokens) // BLOCK_BYTES if STOCK.get(arm) else 0)


def memory_bytes(arm: str, swap_tokens: int) -> int:
    """Of an arm in all: its KV memory, and the store if it has one."""
    store = 0 if arm in STOCK else store_bytes(swap_tokens)
    return blocks_of(arm, swap_tokens) * BLOCK_BYTES + store
