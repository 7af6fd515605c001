"""KV memory of an engine for copies to and from the store: opaque bytes of a block in a layer."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

_logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class BlockPieces(NamedTuple):
    """Blocks from ``first`` on, and the host's bytes of a layer of each, ``[blocks, layer_bytes]``.
    The bytes of a block lie together, and blocks as far apart as their slots."""

    first: int
    pieces: Bytes


LayerPieces = tuple[int, Sequence[BlockPieces]]
"""A layer, and blocks with its pieces of them."""


class KvRows(NamedTuple):
    """A layer's bytes, where the CPU reads them: those of a block begin ``apart`` behind those of
    the one before, the first at ``address``."""

    address: int
    apart: int
    view: memoryview

    def piece(self, block: int, size: int) -> memoryview:
        begin = block * self.apart
        return self.view[begin : begin + size]


class BlockMemory(Protocol):
    """Memory whose blocks are copied to the store and from it.

    ``layer_of`` numbers layers by their names in vLLM; ``layers_here`` are those of the engine's
    own forward pass. ``beside_steps``: whether blocks may be copied while one runs. ``copy_bytes``
    is the most of a copy, after which checksums are computed of it. ``rows`` are the engine's bytes
    by layer; None: out of the CPU's reach, or not in one piece.
    """

    layers: int
    layer_bytes: int
    layer_of: Mapping[str, int]
    layers_here: frozenset[int]
    beside_steps: bool
    # Few enough to be in the processor's cache for the checksums.
    copy_bytes: int = 2**18

    @property
    def rows(self) -> Sequence[KvRows] | None:
        return None

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        """Copy the layer of these blocks to their pieces."""

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        """Copy these pieces to the layer of their blocks."""

    def equals_host(self, layer: int, runs: Sequence[BlockPieces]) -> bool:
        """Whether the layer of these blocks equals their pieces."""

    def layers_to_host(self, layers: Sequence[LayerPieces]) -> None:
        """:meth:`to_host` of several layers."""
        for layer, runs in layers:
            self.to_host(layer, runs)

    def layers_equal_host(self, layers: Sequence[LayerPieces]) -> bool:
        """:meth:`equals_host` of several layers."""
        return all(self.equals_host(layer, runs) for layer, runs in layers)


class KvMemory(BlockMemory):
    """KV cache of an engine on a CPU, copied to and from the store's arena.

    ``kv_caches`` maps layer names, in the order of computation, to vLLM's views ``[blocks,
    kv_heads, block_size, 2 * head_size]``. The layout within a block depends on the device and its
    instruction set, so a block's bytes of a layer are always copied as a whole: in one run, or one
    a head where each head's blocks lie together. ``ValueError`` if they are in other runs, or
    layers differ in size.
    """

    beside_steps = True

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._rows: list[torch.Tensor] = []
        self.layer_of = layer_of = dict[str, int]()
        seen: dict[int, int] = {}
        for name, cache in kv_caches.items():
            # A layer that shares the KV of another has the same memory.
            if cache.data_ptr() not in seen:
                seen[cache.data_ptr()] = len(self._rows)
                self._rows.append(_rows(name, cache))
            layer_of[name] = seen[cache.data_ptr()]
        sizes = {tuple(rows.shape[1:]) for rows in self._rows}
        if len(sizes) != 1:
            named = sorted(runs * of_run for runs, of_run in sizes)
            raise ValueError(f"layers have KV blocks of different sizes ({named} bytes)")
        self.layers = len(self._rows)
        self.layers_here = frozenset(range(self.layers))
        self.runs, self.run_bytes = sizes.pop()
        self.layer_bytes = self.runs * self.run_bytes
        self.device = self._rows[0].device

    @cached_property
    def _host_rows(self) -> list[Bytes]:
        # NumPy copies within host memory: torch would spread each piece over OpenMP's threads,
        # which compute the forward pass meanwhile.
        return [rows.numpy() for rows in self._rows]

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        for rows, pieces in self._both(layer, runs):
            np.copyto(pieces, rows)

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        for rows, pieces in self._both(layer, runs):
            np.copyto(rows, pieces)

    @cached_property
    def rows(self) -> Sequence[KvRows] | None:
        if self.runs > 1:
            return None
        found = []
        for rows in self._rows:
            apart = rows.stride(0)
            flat = rows.as_strided(((len(rows) - 1) * apart + self.layer_bytes,), (1,))
            found.append(KvRows(flat.data_ptr(), apart, flat.numpy().data))
        return found

    def equals_host(self, layer: int, runs: Sequence[BlockPieces]) -> bool:
        return all(np.array_equal(*both) for both in self._both(layer, runs))

    def _both(self, layer: int, runs: Sequence[BlockPieces]) -> Iterator[tuple[Bytes, Bytes]]:
        """Yield views of the engine's bytes and of the slots', ``[blocks, runs, run_bytes]``."""
        for first, pieces in runs:
            rows = self._host_rows[layer][first : first + len(pieces)]
            yield rows, pieces.reshape(rows.shape)


class HostStream:
    """Order of copies and the forward pass on a CPU, where both are synchronous: nothing to do."""

    def mark(self) -> Any:
        """Mark what the forward pass has issued so far; called by its thread."""
        return None

    def wait(self, mark: Any) -> None:
        """Have copies that are issued from now on come after everything before ``mark``."""

    def settle(self) -> None:
        """Return when the copies issued so far are done."""

    def hold(self) -> Any:
        """Have what the forward pass issues from now on come after the copies issued so far. Called
        by its thread. Returns a mark of these copies, for another stream's :meth:`wait`."""
        return None

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


class CudaStream(HostStream):
    """CUDA stream for the copies of one thread, beside the forward pass and other copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        # Its waits leave the core to others.
        self._copied = torch.cuda.Event(blocking=True)
        self._entered: list[AbstractContextManager[None]] = []

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)

    def settle(self) -> None:
        self._copied.record(self._stream)
        self._copied.synchronize()

    def hold(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        torch.cuda.current_stream().wait_event(event)
        return event

    def __enter__(self) -> None:
        # Which stream is current is of a thread, so the context is made in the one that copies.
        current = torch.cuda.stream(self._stream)
        current.__enter__()
        self._entered.append(current)

    def __exit__(self, *exception: Any) -> None:
        self._entered.pop().__exit__(*exception)


@contextmanager
def pinned(device: torch.device, address: int, nbytes: int) -> Iterator[None]:
    """Host memory that is registered with the GPU meanwhile: it copies no other by itself."""
    if device.type != "cuda":
        yield
        return
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0).value
    if error:
        _logger.warning("the KV arena cannot be pinned (CUDA error %s): copies are slow", error)
    try:
        yield
    finally:
        if not error:
            torch.cuda.cudart().cudaHostUnregister(address)


def stream_for(device: torch.device) -> HostStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def _rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    """Return the cache's bytes, ``[blocks, runs, run_bytes]``."""
    runs, apart, run = 1, 1, 1
    # Dimensions within a block may be permuted. Behind those that lie together, one may lie apart.
    for step, size in sorted(zip(cache[0].stride(), cache.shape[1:], strict=True)):
        if size == 1:
            continue
        if step == run and runs == 1:
            run *= size
        elif runs == 1:
            runs, apart = size, step
        else:
            raise ValueError(f"layer {name!r}: a block's KV lies in too many pieces in memory")
    shape, steps = (len(cache), runs, run), (cache.stride(0), apart, 1)
    return cache.as_strided(shape, steps).view(torch.uint8)
