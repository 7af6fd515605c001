"""KV memory of an engine for copies to and from the store: opaque bytes of a block in a layer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

_logger = logging.getLogger(__name__)

Bytes = npt.NDArray[np.uint8]


class BlockMemory(Protocol):
    """Memory whose blocks are copied to the store and from it.

    Attributes:
        layers: Number of layers of a block.
        layer_bytes: Bytes of a block in one layer.
        layer_of: Number of each layer, by its name in vLLM.
        layers_here: Layers that the engine's own forward pass computes.
        beside_steps: Whether blocks may be copied while a forward pass runs.
    """

    layers: int
    layer_bytes: int
    layer_of: Mapping[str, int]
    layers_here: frozenset[int]
    beside_steps: bool

    def to_host(self, layer: int, first: int, pieces: Bytes) -> None:
        """Copy the layer of a run of blocks to ``pieces``, ``[blocks, layer_bytes]``."""

    def from_host(self, layer: int, first: int, pieces: Bytes) -> None:
        """Copy ``pieces``, ``[blocks, layer_bytes]``, to the layer of a run of blocks."""

    def on_host(self, layer: int, first: int, blocks: int) -> Bytes | None:
        """View of the engine's bytes, ``[blocks, layer_bytes]``; None: out of the CPU's reach."""

    def equals_host(self, layer: int, first: int, pieces: Bytes) -> bool:
        """Whether the layer of a run of blocks equals ``pieces``, ``[blocks, layer_bytes]``."""


class KvMemory(BlockMemory):
    """KV cache of an engine, copied to and from host memory.

    ``kv_caches`` maps layer names, in the order of computation, to vLLM's views
    ``[blocks, kv_heads, block_size, 2 * head_size]``. The layout within a block depends on the
    device and its instruction set, so a block's bytes of a layer are always copied as a whole.

    Raises:
        ValueError: a block's bytes of a layer are not contiguous, or layers differ in size.
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
        sizes = {rows.shape[1] for rows in self._rows}
        if len(sizes) != 1:
            raise ValueError(f"layers have KV blocks of different sizes ({sorted(sizes)} bytes)")
        self.layers = len(self._rows)
        self.layers_here = frozenset(range(self.layers))
        self.layer_bytes = sizes.pop()
        self.device = self._rows[0].device
        # NumPy copies within host memory: torch would spread each piece over OpenMP's threads,
        # which compute the forward pass meanwhile.
        self._host_rows = (
            [rows.numpy() for rows in self._rows] if self.device.type == "cpu" else None
        )

    def to_host(self, layer: int, first: int, pieces: Bytes) -> None:
        run = slice(first, first + len(pieces))
        if self._host_rows is not None:
            np.copyto(pieces, self._host_rows[layer][run])
        else:
            torch.from_numpy(pieces).copy_(self._rows[layer][run], non_blocking=True)

    def from_host(self, layer: int, first: int, pieces: Bytes) -> None:
        run = slice(first, first + len(pieces))
        if self._host_rows is not None:
            np.copyto(self._host_rows[layer][run], pieces)
        else:
            self._rows[layer][run].copy_(torch.from_numpy(pieces), non_blocking=True)

    def on_host(self, layer: int, first: int, blocks: int) -> Bytes | None:
        return None if self._host_rows is None else self._host_rows[layer][first : first + blocks]

    def equals_host(self, layer: int, first: int, pieces: Bytes) -> bool:
        rows = self._rows[layer][first : first + len(pieces)]
        return bool(torch.equal(rows, torch.from_numpy(pieces).to(rows.device)))


class HostStream:
    """Order of copies and the forward pass on a CPU, where both are synchronous: nothing to do."""

    def mark(self) -> Any:
        """Mark what the forward pass has issued so far; called by its thread."""
        return None

    def wait(self, mark: Any) -> None:
        """Return when everything before ``mark`` has been computed."""

    def settle(self) -> None:
        """Return when the copies issued so far are done."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


class CudaStream(HostStream):
    """CUDA stream for copies beside the forward pass."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._current = torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def settle(self) -> None:
        self._stream.synchronize()

    def __enter__(self) -> None:
        self._current.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._current.__exit__(*exception)


def pin(device: torch.device, address: int, nbytes: int) -> None:
    """Register host memory with the GPU; copies of other memory block and are slower."""
    if device.type != "cuda":
        return
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(error):
        _logger.warning("the KV arena cannot be pinned (CUDA error %s)", error)


def stream_for(device: torch.device) -> HostStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def _rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    block = cache[0]
    # Its dimensions may be permuted, but must span no more than their elements.
    span = 1 + sum(
        (size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)
    )
    elements = block.numel()
    if span != elements:
        raise ValueError(f"layer {name!r}: a block's KV does not lie together in memory")
    return cache.as_strided((cache.shape[0], elements), (cache.stride(0), 1)).view(torch.uint8)
