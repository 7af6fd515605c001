"""An engine's KV memory as the store sees it: opaque bytes of a block in a layer."""

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
    """Where the blocks are that are copied to the store and from it.

    Attributes:
        layers: Of a block.
        layer_bytes: Of a block in one of them.
        layer_of: By the layer's name.
        layers_here: Those that the engine's own forward pass computes.
        beside_steps: Whether blocks may be copied while that runs.
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
        """The engine's own bytes, ``[blocks, layer_bytes]``, where the CPU can read them."""

    def equals_host(self, layer: int, first: int, pieces: Bytes) -> bool:
        """Whether the layer of a run of blocks is ``pieces``, ``[blocks, layer_bytes]``."""


class KvMemory(BlockMemory):
    """Copies between blocks of an engine's KV cache and host memory.

    ``kv_caches`` holds, by layer name and in the order in which layers compute, vLLM's views
    ``[blocks, kv_heads, block_size, 2 * head_size]``. The inside of a block depends on the device
    and its instruction set, so a block's share of a layer moves whole.

    Raises:
        ValueError: a block's bytes of a layer do not lie together, or layers differ in size.
    """

    beside_steps = True

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._rows: list[torch.Tensor] = []
        self.layer_of = layer_of = dict[str, int]()
        seen: dict[int, int] = {}
        for name, cache in kv_caches.items():
            # Layers that share another one's KV point to the same memory.
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
        # Between host memory NumPy copies: torch would spread each piece over OpenMP's threads,
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
    """Orders copies with the forward pass where both run on the CPU: nothing runs behind it."""

    def mark(self) -> Any:
        """Taken by the forward pass: everything up to here."""
        return None

    def wait(self, mark: Any) -> None:
        """Return when what ``mark`` marked has been computed."""

    def settle(self) -> None:
        """Return when the copies so far are done."""

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None: ...


class CudaStream(HostStream):
    """Copies on a stream of their own beside the forward pass."""

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
    """Let a GPU read and write host memory by itself; without, its copies block and are slower."""
    if device.type != "cuda":
        return
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(error):
        _logger.warning("the KV arena cannot be pinned (CUDA error %s)", error)


def stream_for(device: torch.device) -> HostStream:
    return CudaStream(device) if device.type == "cuda" else HostStream()


def _rows(name: str, cache: torch.Tensor) -> torch.Tensor:
    block = cache[0]
    # Its dimensions may be permuted; together they must span no more than their elements.
    span = 1 + sum(
        (size - 1) * step for size, step in zip(block.shape, block.stride(), strict=True)
    )
    elements = block.numel()
    if span != elements:
        raise ValueError(f"layer {name!r}: a block's KV does not lie together in memory")
    return cache.as_strided((cache.shape[0], elements), (cache.stride(0), 1)).view(torch.uint8)
