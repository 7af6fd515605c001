"""Lending's kernels on the device: whether they compute attention, and in which time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.gpu.shapes import Loan, llama
from benchmarks.gpu.step import (
    HAS_GPU,
    Results,
    captured,
    copy_gb_s,
    host_times_us,
    main,
    times_us,
)

# isort: split
import torch
from torch.nn.functional import scaled_dot_product_attention

from loomserve.platform.lending.cuda.borrowing import ANSWERED

SIZES = ((16, 1024), (64, 1024), (128, 1024), (16, 4096), (128, 4096)) if HAS_GPU else ((3, 32),)
"""Rows, and tokens of each one's context."""
TASKS = 8
"""Of a graph, so that its launch is a small part of it."""
MOST_ERROR = 1e-2 if HAS_GPU else 1e-5
"""Of bfloat16's output, whose numbers are below 1, or of float32's."""


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> torch.Tensor:
    """By torch, in float32, a row at a time: output of [rows, heads, head_size]."""
    outputs = []
    for row, keys, values in zip(query.float(), key, value, strict=True):
        logits = row.unflatten(0, (len(keys), -1)) @ keys.float().mT * scale
        outputs.append((logits.softmax(-1) @ values.float()).flatten(0, 1))
    return torch.stack(outputs)


def error(loan: Loan) -> float:
    """The greatest difference from torch's attention over the same KV, of poisoned outputs."""
    query, key, value = loan.rows()
    loan.borrower.post(0, query, key, value)
    loan.lender.serve()
    output = torch.full_like(query, torch.nan)
    loan.borrower.wait(output)
    if not int(loan.borrower.state[ANSWERED.value]):
        raise RuntimeError(f"no answer, and the loan is closed as {int(loan.buffer.closed)}")
    whole = attention(query, *loan.contiguous(0), loan.shape.scale)
    return float((output.float() - whole).abs().max())


def sizes_of(loan: Loan) -> dict[str, int]:
    """Bytes that a task moves: into the buffer, out of KV, and back."""
    shape, item = loan.shape, loan.shape.dtype.itemsize
    context = shape.max_blocks * shape.block_size
    row = shape.query_width + 2 * shape.key_width
    return {
        "posted": shape.max_rows * row * item,
        "kv": shape.max_rows * context * 2 * shape.key_width * item,
        "answer": shape.max_rows * shape.query_width * item,
    }


def graph_times(shape: Any) -> dict[str, Any]:
    """Microseconds a task, in graphs that end behind each of its kernels in turn."""
    found: dict[str, Any] = {}
    parts: tuple[tuple[str, int], ...] = (
        ("post", 1),
        ("post, serve", 2),
        ("post, serve, wait and fetch", 3),
    )
    for name, upto in parts:
        # Of its own: a task that nobody serves is the last one of its loan.
        loan = Loan.open(shape)
        query, key, value = loan.rows()
        output = torch.zeros_like(query)

        def tasks(
            loan: Loan = loan,
            upto: int = upto,
            rows: tuple[torch.Tensor, ...] = (query, key, value, output),
        ) -> None:
            for _ in range(TASKS):
                loan.borrower.post(0, *rows[:3])
                if upto >= 2:
                    loan.lender.serve()
                if upto == 3:
                    loan.borrower.wait(rows[3])

        tasks()
        found[name] = {
            "in a graph": times_us(captured(tasks).replay, TASKS),
            "eager": times_us(tasks, TASKS),
            "queued by the host": host_times_us(tasks, TASKS),
        }
        if upto > 1 and int(loan.buffer.closed):
            raise RuntimeError(f"{name} closed its loan as {int(loan.buffer.closed)}")
    return found


def ceilings(loan: Loan) -> dict[str, Any]:
    """Torch's own: attention over the same KV, contiguous, and a copy of what is posted."""
    query, key, value = loan.rows()
    keys, values = loan.contiguous(0)
    parts = (query, key, value)
    targets = [torch.empty_like(part) for part in parts]

    def attend() -> None:
        for _ in range(TASKS):
            scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)

    def copy() -> None:
        for _ in range(TASKS):
            for target, part in zip(targets, parts, strict=True):
                target.copy_(part)

    works: tuple[tuple[str, Callable[[], None]], ...] = (("attention", attend), ("copy", copy))
    found: dict[str, Any] = {}
    for name, work in works:
        work()
        found[name] = times_us(captured(work).replay, TASKS)
    return found


def kernels(results: Results) -> None:
    differences: list[float] = []
    for rows, context in SIZES:
        shape = llama(layers=1, rows=rows, context=context)
        loan = Loan.open(shape)
        errors = {"fetched": error(loan)}
        differences += errors.values()
        found: dict[str, Any] = {"errors": errors, "bytes": sizes_of(loan)}
        if HAS_GPU:
            found["us a task"] = graph_times(shape)
            found["ceilings, us"] = ceilings(loan)
        results.add(f"{rows} rows of {context} tokens", found)
    if HAS_GPU:
        results.attempt("ceiling: copy, GB/s", partial(copy_gb_s))
    results.end(f"greatest error {max(differences):.1e}")
    # So written, a NaN is an error, too.
    if not all(difference <= MOST_ERROR for difference in differences):
        raise SystemExit(f"errors of {differences} are more than rounding, {MOST_ERROR:.0e}")


if __name__ == "__main__":
    main(kernels)
