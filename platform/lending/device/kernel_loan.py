"""One loan of a lender whose rows kernels carry: its memory, its kernels, and what they served."""

from __future__ import annotations

import time
from functools import cached_property

import torch

from loomserve.platform.lending.cuda.attention import PICKED_UP, SERVING
from loomserve.platform.lending.cuda.buffer import (
    NUMBER,
    POSTED_AT,
    ROWS,
    TaskBuffer,
    borrower_bytes,
    lender_bytes,
)
from loomserve.platform.lending.cuda.resident import serve_for
from loomserve.platform.lending.cuda.serving import DeviceLender
from loomserve.platform.lending.device.copies import IDLED, PICKUP_NS, SERVICE_NS, BlockCopies
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.shape import answer_file, task_file, task_shape
from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring.attention_server import Caches
from loomserve.platform.lending.ring.lent_ring import GRANTED, LentRing
from loomserve.platform.lending.ring.ring import RingPeer
from loomserve.platform.lending.ring.words import Closed, ControlLine

_SHARE = 8
"""One in so many multiprocessors has a program of the kernel that stays."""


class KernelLoan:
    """A ring and its kernels, which there are once the borrower has made its memory. Kernels are
    queued on the current stream; copies of blocks are the ring's."""

    def __init__(
        self, ring: LentRing, caches: Caches, memory: SharedMemory, rows: Rows = PLAIN
    ) -> None:
        self.ring = ring
        self.borrower = RingPeer(ring, ControlLine.BORROWER)
        self.copies = BlockCopies(ring, caches, rows)
        self._rows = rows
        self._shape = task_shape(ring)
        self._caches = caches
        self._memory = memory
        self._tasks = memory.make(task_file(ring.path), lender_bytes(self._shape))
        self._closed = memory.pin(ring.areas.control[ControlLine.CLOSED, :1])
        self._granted = memory.pin(ring.own[GRANTED : GRANTED + 1])
        self._kernels: DeviceLender | None = None
        self._posted = self._tasks
        self._counted = 0
        self._staying: torch.cuda.Stream | None = None

    def compile(self, stays_s: float | None = None) -> None:
        """Compile the kernels before a task waits for them; of the one that stays, if given."""
        device = self._tasks.device
        answers = torch.empty(borrower_bytes(self._shape), dtype=torch.uint8, device=device)
        kernels = self._kernels_for(answers)
        with kernels.compiling():
            if stays_s is None:
                kernels.serve()
            else:
                serve_for(kernels, stays_s, self._programs)

    def serve(self) -> bool:
        """Look for a task, wait for the look, and serve what is there, if anything is."""
        if (kernels := self._between_copies()) is None:
            return False
        kernels.poll()
        state = kernels.state.tolist()
        if state[SERVING.value] == state[NUMBER.value]:
            return False
        begin = time.monotonic_ns()
        self.copies.wrote(self.ring.granted)
        kernels.attend(state[ROWS.value])
        posted_at = int(self._posted[POSTED_AT.value])
        self.count()
        self.copies.count(SERVICE_NS, time.monotonic_ns() - begin)
        # By clocks of two devices, which may be apart.
        self.copies.count(PICKUP_NS, max(0, state[PICKED_UP.value] - posted_at))
        return True

    def stay(self, seconds: float) -> bool:
        """Queue the kernel that stays, unless it is there still; False then. It has a stream of its
        own, or another loan's would have to end before."""
        if self._staying is not None and not self._staying.query():
            return False
        self.count()
        if (kernels := self._between_copies()) is None:
            return False
        self.copies.wrote(self.ring.granted)
        if not kernels.state.is_cuda:
            serve_for(kernels, seconds, self._programs)
            return True
        if self._staying is None:
            self._staying = torch.cuda.Stream(priority=torch.cuda.current_stream().priority)
        self._staying.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._staying):
            serve_for(kernels, seconds, self._programs)
        return True

    def clear(self) -> None:
        """Clear what the borrower wrote behind what is granted to it, before others use it."""
        granted = self.ring.granted
        if granted < self.copies.written and self._staying is not None:
            # The kernel that stays may serve a task that it took before.
            self._staying.synchronize()
        self.copies.clear(granted)

    def count(self) -> None:
        """Count what was served since the last time; waits for what is queued here."""
        if self._kernels is not None:
            number = int(self._kernels.state[NUMBER.value])
            self.copies.count(IDLED, number - self._counted)
            self._counted = number

    def end(self) -> None:
        """Wait for all kernels, clear what was written, and forget all memory."""
        if self._tasks.is_cuda:
            torch.cuda.synchronize()
        self.copies.clear(0)
        self._kernels = None
        # Words of the ring, which is unmapped after this, are pinned as long as these live.
        del self._closed, self._granted
        for file in (task_file(self.ring.path), answer_file(self.ring.path)):
            file.unlink(missing_ok=True)

    @cached_property
    def _programs(self) -> int:
        """How many programs the kernel that stays has."""
        device = self._tasks.device
        if device.type == "cpu":
            return 1
        of: int = torch.cuda.get_device_properties(device).multi_processor_count
        return max(1, of // _SHARE)

    def _between_copies(self) -> DeviceLender | None:
        """Copy blocks if that is asked; return the kernels if tasks may be served."""
        if self.ring.closed is not Closed.OPEN or self.copies.serve():
            return None
        return self._kernels or self._meet()

    def _meet(self) -> DeviceLender | None:
        answers = self._memory.open(answer_file(self.ring.path), borrower_bytes(self._shape))
        if answers is None:
            return None
        self._kernels = self._kernels_for(answers)
        return self._kernels

    def _kernels_for(self, answers: torch.Tensor) -> DeviceLender:
        buffer = TaskBuffer.over(self._shape, self._tasks, answers, self._closed)
        self._posted = buffer.posted
        return DeviceLender(
            self._shape,
            buffer,
            self._caches,
            self._granted,
            abreast=self._rows.abreast,
            apart=self._rows.apart,
        )
