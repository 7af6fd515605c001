"""A lender's server that stays on a few multiprocessors, and looks for tasks by itself.

Neither a stream nor an operator of the lender's own model stands before a task, and its model needs
no polls; what the server takes of those multiprocessors it takes all the time. All its programs
must run at once, since they wait for each other, so it is launched as a cooperative grid, which
fails where they never would. It belongs on a stream of its own.

The first program looks for tasks, and says which there is by ``SERVING``. For each, all programs
write rows, wait for each other, and attend; who ends last publishes. The kernel ends by itself
after a while, lest a host that died leave it there, and the host queues the next.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl

from loomserve.platform.lending.cuda.attention import SERVING, attend_units
from loomserve.platform.lending.cuda.buffer import NUMBER
from loomserve.platform.lending.cuda.kernel import INTERPRETED, LOOKS, kernel, now_ns, rest
from loomserve.platform.lending.cuda.serving import DeviceLender, take_task, write_units

# More words of the lender's state.
ENDED = tl.constexpr(7)
WRITTEN = tl.constexpr(8)
"""How often a program had written its rows, of all tasks since the launch."""


@kernel(
    "layers",
    "max_rows",
    "blocks",
    "max_requests",
    "max_blocks",
    "first",
    "programs",
    "most_ns",
)
def serve_tasks(
    posted: tl.tensor,
    query: tl.tensor,
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    requests: tl.tensor,
    contexts: tl.tensor,
    block_table: tl.tensor,
    caches: tl.tensor,
    granted: tl.tensor,
    closed: tl.tensor,
    state: tl.tensor,
    ended: tl.tensor,
    sums: tl.tensor,
    gathered: tl.tensor,
    done: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    layers: tl.tensor,
    max_rows: tl.tensor,
    blocks: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    block_stride: tl.tensor,
    abreast_stride: tl.tensor,
    head_stride: tl.tensor,
    token_stride: tl.tensor,
    first: tl.tensor,
    programs: tl.tensor,
    most_ns: tl.tensor,
    abreast: tl.constexpr,
    width: tl.constexpr,
    scale: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    padded_group: tl.constexpr,
    head_size: tl.constexpr,
    padded_head: tl.constexpr,
    block_size: tl.constexpr,
    row_tile: tl.constexpr,
    context_tile: tl.constexpr,
    part_tiles: tl.constexpr,
    most_parts: tl.constexpr,
) -> None:
    """Serve tasks until the loan is closed, or for ``most_ns`` ns and to the end of a task then.

    Args:
        first: the number of this launch's first program among ``programs``.

    The others are as of ``write_rows`` and ``attend_rows``.
    """
    me = first + tl.program_id(0)
    begin = now_ns()
    seen = tl.load(state + NUMBER)
    tasks = tl.full((), 0, tl.int64)
    looks = tl.full((), 0, tl.int64)
    running = tl.full((), 1, tl.int32)
    while running != 0:
        if me == 0:
            looks += 1
            over = looks % LOOKS == 0
            if over:
                over = (tl.load(closed, volatile=True) != 0) | (now_ns() - begin >= most_ns)
            if over:
                tl.atomic_xchg(state + ENDED, 1, sem="release", scope="gpu")
            else:
                take_task(posted, granted, closed, state, seen, blocks, layers, max_rows)
        # Before SERVING: a task that was taken before the end is served.
        over_for_all = tl.atomic_add(state + ENDED, 0, sem="acquire", scope="gpu")
        serving = tl.atomic_add(state + SERVING, 0, sem="acquire", scope="gpu")
        if serving != seen:
            write_units(
                me,
                programs,
                key,
                value,
                slots,
                caches,
                closed,
                state,
                block_stride,
                abreast_stride,
                head_stride,
                token_stride,
                abreast,
                head_size,
                width,
                block_size,
                row_tile,
            )
            tl.debug_barrier()
            tl.atomic_add(state + WRITTEN, 1, sem="release", scope="gpu")
            tasks += 1
            while tl.atomic_add(state + WRITTEN, 0, sem="acquire", scope="gpu") < tasks * programs:
                rest()
            tl.debug_barrier()
            attend_units(
                me,
                programs,
                serving,
                query,
                requests,
                contexts,
                block_table,
                caches,
                closed,
                state,
                ended,
                sums,
                gathered,
                done,
                output,
                lse,
                max_requests,
                max_blocks,
                block_stride,
                abreast_stride,
                head_stride,
                token_stride,
                abreast,
                scale,
                kv_heads,
                group,
                padded_group,
                head_size,
                padded_head,
                block_size,
                context_tile,
                part_tiles,
                most_parts,
            )
            seen = serving
        elif over_for_all != 0:
            running = tl.full((), 0, tl.int32)
        else:
            rest()


def serve_for(lender: DeviceLender, seconds: float, programs: int) -> None:
    """Queue the server on the current stream, for a while.

    Args:
        lender: whose loan it serves, and nobody else's kernels meanwhile.
        seconds: for so long, unless the loan is closed before; a task that is being served then is
            served to its end.
        programs: how many there are, one a multiprocessor.

    Raises:
        RuntimeError: so many programs cannot run at once there.
    """
    begin_anew(lender.state)
    queue_programs(lender, seconds, programs, range(programs))


def begin_anew(state: torch.Tensor) -> None:
    """Queue what a lender's state needs before its programs begin again."""
    state[ENDED.value : WRITTEN.value + 1].zero_()


def queue_programs(lender: DeviceLender, seconds: float, programs: int, of: range) -> None:
    """Queue these of the server's programs; in the interpreter, in which programs of one launch
    follow each other, each needs a launch of its own, in a process of its own."""
    options: dict[str, Any] = {} if INTERPRETED else {"launch_cooperative_grid": True}
    lender.queue(
        serve_tasks,
        (len(of),),
        first=of.start,
        programs=programs,
        most_ns=round(seconds * 1e9),
        **options,
    )
