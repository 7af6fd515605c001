"""How long a flag takes from one stream to another and back, and what a vain look costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu.shapes import Loan, llama
from benchmarks.gpu.step import HAS_GPU, Results, captured, host_times_us, main, spread, times_us

# isort: split
import torch
import triton.language as tl

from loomserve.platform.lending.cuda.kernel import INTERPRETED, kernel, now_ns, release, rest

ROUNDS = 1000
PATIENCE_NS = 2_000_000_000
LOOKS = 256
"""Of a graph: some as many as operators of a model of 32 layers."""


@kernel("first", "rounds")
def ping_pong(
    own: tl.tensor, other: tl.tensor, times: tl.tensor, first: tl.tensor, rounds: tl.tensor
) -> None:
    """Raise the other's flag to 1, 2, … and await each in one's own, before or after it.

    Args:
        first: 1 for the end that begins.
        times: int64 [2], begin and end of it all, ns; the end is 0 if the other did not answer.
    """
    begin = now_ns()
    alive = tl.full((), 1, tl.int32)
    number = tl.full((), 0, tl.int64)
    while (number < rounds) & (alive != 0):
        number += 1
        if first != 0:
            release(other, number)
        while (tl.atomic_add(own, 0, sem="acquire", scope="sys") != number) & (alive != 0):
            if now_ns() - begin > PATIENCE:
                alive = tl.full((), 0, tl.int32)
            rest()
        if first == 0:
            release(other, number)
    tl.store(times, begin)
    tl.store(times + 1, tl.where(alive != 0, now_ns(), 0))


PATIENCE = tl.constexpr(PATIENCE_NS)


@kernel()
def nothing(word: tl.tensor) -> None:
    """The ceiling of a look: a kernel that reads one word."""
    if tl.load(word) != 0:
        tl.store(word, 0)


def round_trip_us(make: Callable[[], torch.Tensor]) -> dict[str, float]:
    """Between two kernels on two streams, by flags in the memory that ``make`` gives."""
    streams = [torch.cuda.Stream() for _ in range(2)]
    # Compiled and loaded before, since a kernel that spins holds up what loads another.
    flags = [make() for _ in range(2)]
    ping_pong[(1,)](*flags, torch.zeros(2, dtype=torch.int64, device="cuda"), 1, 0, num_warps=1)
    taken = []
    for _ in range(8):
        flags = [make() for _ in range(2)]
        times = [torch.zeros(2, dtype=torch.int64, device="cuda") for _ in range(2)]
        torch.cuda.synchronize()
        for end, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                ping_pong[(1,)](
                    flags[end], flags[1 - end], times[end], 1 - end, ROUNDS, num_warps=1
                )
        torch.cuda.synchronize()
        begin, end_ns = times[0].tolist()
        if not end_ns:
            raise RuntimeError("the kernels did not run at the same time")
        taken.append((end_ns - begin) / ROUNDS / 1000)
    return spread(taken)


def looks() -> dict[str, Any]:
    """Microseconds of a look that finds nothing, beside a kernel that does nothing."""
    loan = Loan.open(llama(layers=1, rows=16, context=64))
    word = torch.zeros(1, dtype=torch.int64, device="cuda")

    def look() -> None:
        for _ in range(LOOKS):
            loan.lender.poll()

    def idle() -> None:
        for _ in range(LOOKS):
            nothing[(1,)](word, num_warps=1)

    look()
    idle()
    found: dict[str, Any] = {}
    for name, work in (("look", look), ("ceiling: empty kernel", idle)):
        found[name] = {
            "queued by the host": host_times_us(work, LOOKS),
            "eager": times_us(work, LOOKS),
            "in a graph": times_us(captured(work).replay, LOOKS),
        }
    return found


def flags(results: Results) -> None:
    if not HAS_GPU:
        # Two interpreted kernels do not run at the same time in one process.
        results.add("interpreted", bool(INTERPRETED))
        loan = Loan.open(llama(layers=1, rows=2, context=16))
        loan.lender.poll()
        word = torch.zeros(1, dtype=torch.int64)
        nothing[(1,)](word)
        one, two, times = (torch.zeros(2, dtype=torch.int64) for _ in range(3))
        one[0] = 1
        ping_pong[(1,)](one, two, times, 1, 1)
        if int(two[0]) != 1 or not int(times[1]):
            raise RuntimeError(f"a flag was not raised: {two.tolist()}, {times.tolist()}")
        results.end("one end alone raised its flag")
        return
    results.attempt(
        "round trip, us, flags on the device",
        lambda: round_trip_us(lambda: torch.zeros(1, dtype=torch.int64, device="cuda")),
    )
    results.attempt(
        "round trip, us, flags in pinned memory",
        lambda: round_trip_us(lambda: torch.zeros(1, dtype=torch.int64).pin_memory()),
    )
    results.attempt("looks, us", looks)
    results.end("round trips of two streams, and looks that find nothing")


if __name__ == "__main__":
    main(flags)
