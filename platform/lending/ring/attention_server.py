"""The lender's end of its task rings: computes borrowers' attention with their KV in its memory."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from loomserve.platform.lending.policy.layout import PLAIN, Rows
from loomserve.platform.lending.ring import native
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing
from loomserve.platform.lending.ring.words import LINE_WORDS, Closed, ControlLine

Caches = Sequence[tuple[Tensor, Tensor]]
ComputeLayers = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Computes whole layers of a borrower's batch.

Takes hidden states and residual in the ring's ``query`` and ``output``, then query_start_loc,
seq_lens, block_table, slot_mapping and the metadata of vLLM's kernel. Leaves hidden states and
residual in ``output`` and ``query``."""


class AttentionServer:
    """Serves all rings of one lender's worker, one task at a time.

    While the engine runs a step (:meth:`busy`) tasks are served by :meth:`poll`, which the model's
    forward calls between its operators; between steps (:meth:`idle`) by a thread, which spins for
    ``spin_s`` after its last task and then sleeps until a borrower wakes it. It takes as many cores
    as the thread that opens the first ring computes with. vLLM's CPU kernels share one scratch pad
    a process, so the two never serve at once, and no other thread may run those kernels while the
    server is idle.

    A task whose layer, rows or blocks are not the borrower's closes the ring as REFUSED before any
    memory is touched; an error of the kernel closes it as FAILED. Copies of blocks are tasks like
    others.

    What a borrower wrote is zeroed before memory that it gave back is used again: vLLM's kernel
    weights what stands behind a sequence by zero, which an infinity or NaN there would survive.
    """

    poll: Callable[[], int]
    """Serve posted tasks, at most one a ring, and return how many. If there are none, it takes a
    fraction of a microsecond."""

    def __init__(self, spin_s: float = 50e-6, *, split_kv: bool = True) -> None:
        """``split_kv``: whether several threads may share a sequence, as in vLLM's kernels."""
        self._split_kv = split_kv
        self._end: Any = native.extension().AttentionServer(int(spin_s * 1e9))
        # Called so often that a call of Python's own in between would double what it costs.
        self.poll = self._end.poll
        # Each ring as that end knows it.
        self._mapped: dict[LentRing, Any] = {}
        self._layers: dict[LentRing, ComputeLayers | None] = {}
        # A thread of the module's must not outlive Python.
        self._stop = weakref.finalize(self, self._end.stop)

    def open(
        self,
        ring: LentRing,
        caches: Caches,
        layers: ComputeLayers | None = None,
        rows: Rows = PLAIN,
    ) -> None:
        """Serve this ring, which :meth:`LentRing.create` has made, from now on. All granted memory
        must hold finite numbers of the borrower's dtype, as vLLM's kernel reads a sequence's last
        block to its end. ``caches`` are of the borrower's layers, [rows, kv_heads, block_size,
        head_size], all with the same strides; a head's tokens are contiguous. ``layers`` computes a
        task in place of attention. ``ValueError`` if the caches are not of the ring's geometry,
        ``RuntimeError`` if vLLM's kernels are not loaded."""
        geometry = ring.geometry
        _check(caches, geometry)
        ring.words[ControlLine.LENDER * LINE_WORDS] = os.getpid()
        mapped = native.mapped(ring)
        self._end.open(
            mapped,
            ring.own,
            geometry.query_heads,
            geometry.scale,
            geometry.isa,
            geometry.sliding_window,
            geometry.softcap,
            self._split_kv,
            list(caches),
            layers,
            *rows,
        )
        self._mapped[ring] = mapped
        # The module does not keep it alive.
        self._layers[ring] = layers

    def close(self, ring: LentRing) -> bool:
        """Serve the ring no more, which stays open, and clear what was written, after a task that
        is being served. Returns whether the ring had layers, which are freed."""
        self._end.close(self._mapped.pop(ring))
        return self._layers.pop(ring, None) is not None

    def busy(self) -> None:
        """The engine begins a step, with memory that borrowers may have given back. Waits for a
        task that the idle thread serves just now."""
        self._end.busy()

    def idle(self) -> None:
        """The engine has ended its step. A new server starts idle."""
        self._end.idle()

    def dead(self) -> list[LentRing]:
        """Return the served rings that have been closed, as when their borrower died. That is seen
        within 0.1 s while the server is idle, else when the next step begins."""
        return [ring for ring in self._mapped if ring.closed is not Closed.OPEN]

    def stop(self) -> None:
        """End the idle thread, and serve no ring any more, for good."""
        self._stop()
        self._mapped.clear()


def _check(caches: Caches, geometry: Geometry) -> None:
    dtype: torch.dtype = getattr(torch, geometry.dtype)
    inner = (geometry.kv_heads, geometry.block_size, geometry.head_size)
    for key, value in caches:
        sound = (
            key.shape[1:] == inner
            and key.stride()[2:] == (geometry.head_size, 1)
            and key.dtype == value.dtype == dtype
            and key.shape == value.shape
            and key.stride() == value.stride()
        )
        if not sound:
            raise ValueError(
                f"KV caches of {tuple(key.shape)} and {tuple(value.shape)}, strides {key.stride()} "
                f"and {value.stride()} are not of the borrower's geometry {geometry}"
            )
    if len(caches) != geometry.layers or len({len(key) for key, _ in caches}) != 1:
        raise ValueError(
            f"KV caches of {[len(key) for key, _ in caches]} blocks are not alike for "
            f"{geometry.layers} layers"
        )
