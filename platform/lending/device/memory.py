"""Memory that both ends of a loan map; each opens what the other made by a file beside the ring."""

from __future__ import annotations

import ctypes
import importlib
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.files import replace_private

_PAGE = 4096
_HANDLE_BYTES = 64
_NAME_BYTES = 32
"""Of a PCI bus id, which has 13."""


class SharedMemory(Protocol):
    """Memory of one kind of device that another process of the same user can map."""

    def make(self, path: Path, nbytes: int) -> torch.Tensor:
        """Return uint8 [nbytes] of zeros, and leave at ``path`` what it is opened by."""

    def open(self, path: Path, nbytes: int) -> torch.Tensor | None:
        """Map what was made at ``path``, and remove the file; None if there is none. ``ValueError``
        if it is of another size, ``StartError`` if this device does not reach it."""

    def pin(self, words: torch.Tensor) -> torch.Tensor:
        """Have kernels reach these int64 words of one page of the host's memory, while the result
        lives."""


class CudaMemory:
    """Memory of this process's current GPU; the file holds its CUDA IPC handle. It is allocated
    apart from torch's, whose segments may be of a kind that has no handle."""

    def make(self, path: Path, nbytes: int) -> torch.Tensor:
        runtime = _runtime()
        pointer = int(_checked(runtime.cudaMalloc(nbytes)))
        memory = cuda_tensor(pointer, nbytes, runtime.cudaFree)
        memory.zero_()
        torch.cuda.current_stream().synchronize()
        handle = _checked(runtime.cudaIpcGetMemHandle(pointer))
        named = _checked(runtime.cudaDeviceGetPCIBusId(_NAME_BYTES, torch.cuda.current_device()))
        gpu = bytes(named).partition(b"\0")[0].decode()
        replace_private(path, f"{nbytes} {ipc_bytes(handle).hex()} {gpu}")
        return memory

    def open(self, path: Path, nbytes: int) -> torch.Tensor | None:
        if not path.exists():
            return None
        size, handle, gpu = path.read_text().split()
        if int(size) != nbytes:
            raise ValueError(f"{path} is of {size} bytes, not {nbytes}")
        runtime = _runtime()
        error: object = "no peer access"
        if _reaches(gpu):
            flags = runtime.cudaIpcMemLazyEnablePeerAccess
            held = ipc_handle(bytes.fromhex(handle))
            error, pointer = runtime.cudaIpcOpenMemHandle(held, flags)
        if error:
            raise StartError(
                f"this GPU does not reach the memory of GPU {gpu} ({error}): lend between GPUs of "
                "which nvidia-smi topo -p2p r says OK"
            )
        path.unlink()
        return cuda_tensor(int(pointer), nbytes, runtime.cudaIpcCloseMemHandle)

    def pin(self, words: torch.Tensor) -> torch.Tensor:
        runtime = _runtime()
        page = words.data_ptr() // _PAGE * _PAGE
        _checked(runtime.cudaHostRegister(page, _PAGE, runtime.cudaHostRegisterMapped))
        # A view of its own, whose end is the end of the pinning.
        pinned = words.view_as(words)
        weakref.finalize(pinned, runtime.cudaHostUnregister, page)
        return pinned


def ipc_bytes(handle: Any) -> bytes:
    """Return what a ``cudaIpcMemHandle_t`` holds, of which the package gives the address alone."""
    return ctypes.string_at(handle.getPtr(), _HANDLE_BYTES)


def ipc_handle(held: bytes) -> Any:
    handle = _runtime().cudaIpcMemHandle_t()
    ctypes.memmove(handle.getPtr(), held, _HANDLE_BYTES)
    return handle


class _Allocation:
    """What torch takes for an array of CUDA's; freed with the last tensor that uses it."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 3,
        }


def cuda_tensor(pointer: int, nbytes: int, free: Callable[[int], Any]) -> torch.Tensor:
    """Return uint8 ``[nbytes]`` of memory that the current GPU reaches, whichever GPU's it is; at
    its end ``free`` gets the address. ``StartError`` if torch makes a copy of it."""
    allocation = _Allocation(pointer, nbytes)
    weakref.finalize(allocation, free, pointer)
    # With an index torch takes it as that GPU's; without, it asks whose it is, and copies.
    tensor = torch.as_tensor(allocation, device=torch.device("cuda", torch.cuda.current_device()))
    if tensor.data_ptr() != pointer:
        raise StartError("torch copied what another GPU has, and would not see what that writes")
    return tensor


def _reaches(gpu: str) -> bool:
    """Whether the current GPU reaches the memory of the one with this PCI bus id. Of one that this
    process does not see, CUDA says nothing but by its handles."""
    runtime, here = _runtime(), torch.cuda.current_device()
    error, there = runtime.cudaDeviceGetByPCIBusId(gpu.encode())
    if int(error):
        runtime.cudaGetLastError()  # or who asks for it later would take it for its own
        return True
    return there == here or bool(_checked(runtime.cudaDeviceCanAccessPeer(here, there)))


def _runtime() -> Any:
    """CUDA's runtime, of a package that machines without a GPU do not have."""
    return importlib.import_module("cuda.bindings.runtime")


def _checked(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if int(error):
        raise RuntimeError(f"CUDA: {error}")
    return values[0] if values else None
