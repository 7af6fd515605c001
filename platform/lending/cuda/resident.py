"""A lender's server that stays on a few multiprocessors, and looks for tasks by itself.

Neither a stream nor an operator of the lender's own model stands before a task, and its model needs
no polls; what the server takes of those multiprocessors it takes all the time. All its programs
must run at once, since they wait for each other, so it is launched as a cooperative grid, which
fails where they never would. It belongs on a stream of its own.

The first program looks for tasks, and says which there is by ``SERVING``. For each, all programs
write rows, wait for each other, and attend; who ends last publishes. The kernel ends by itself
after a while, so that a host that died does not leave it there, and the host queues the next.
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
    "blocks", "layers", "max_rows", "max_requests", "max_blocks", "first", "programs", "most_ns"
)
def serve_tasks(
    buffer: tl.tuple,
    granted: tl.tensor,
    memory: tl.tuple,
    caches: tl.tensor,
    strides: tl.tuple,
    blocks: tl.tensor,
    layers: tl.tensor,
    max_rows: tl.tensor,
    max_requests: tl.tensor,
    max_blocks: tl.tensor,
    first: tl.tensor,
    programs: tl.tensor,
    most_ns: tl.tensor,
    fixed: tl.constexpr,
) -> None:
    """Serve tasks until the loan is closed, or for ``most_ns`` ns and to the end of a task then.
    ``first`` is the number of this launch's first program among ``programs``. The other arguments
    are those of :func:`~loomserve.platform.lending.cuda.attention.attend_rows`."""
    me = first + tl.program_id(0)
    state = memory.state
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
                closed = tl.load(buffer.closed, volatile=True) != 0
                over = closed | (now_ns() - begin >= most_ns)
            if over:
                tl.atomic_xchg(state + ENDED, 1, sem="release", scope="gpu")
            else:
                take_task(
                    buffer.posted, granted, buffer.closed, state, seen, blocks, layers, max_rows
                )
        # Before SERVING: a task that was taken before the end is served.
        over_for_all = tl.atomic_add(state + ENDED, 0, sem="acquire", scope="gpu")
        serving = tl.atomic_add(state + SERVING, 0, sem="acquire", scope="gpu")
        if serving != seen:
            write_units(me, programs, buffer, state, caches, strides, fixed)
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
                buffer,
                memory,
                caches,
                strides,
                max_requests,
                max_blocks,
                fixed,
            )
            seen = serving
        elif over_for_all != 0:
            running = tl.full((), 0, tl.int32)
        else:
            rest()


def serve_for(lender: DeviceLender, seconds: float, programs: int) -> None:
    """Queue the server on the current stream: ``programs``, a multiprocessor each, for ``seconds``
    or until the loan is closed. A task that is being served when the time is up is served to its
    end. Nobody may queue this lender's other kernels meanwhile. ``RuntimeError`` if so many
    programs cannot run at once there."""
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
