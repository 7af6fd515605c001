"""How memory of another GPU is opened: by CUDA's runtime, in whose place one of two GPUs stands."""

# ruff: noqa: N802, N815 - CUDA's names

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loomserve.platform.base.errors import StartError
from loomserve.platform.lending.device import memory as memory_module
from loomserve.platform.lending.device.memory import CudaMemory

NAMES = (b"0000:01:00.0", b"0000:02:00.0")
NBYTES = 256


class Runtime:
    """CUDA's, and torch's view of it, of a process whose current GPU is ``here``, and which sees
    those named. Addresses are the host's."""

    cudaIpcMemLazyEnablePeerAccess = 1

    def __init__(self) -> None:
        self.here, self.visible, self.peers, self.opens = 0, [0, 1], True, True
        self.owner: dict[int, int] = {}
        self.held: list[Any] = []
        self.handles: list[int] = []

    # CUDA's

    def cudaMalloc(self, nbytes: int) -> tuple[int, int]:
        self.held.append((ctypes.c_uint8 * nbytes)())
        pointer = ctypes.addressof(self.held[-1])
        self.owner[pointer] = self.here
        return 0, pointer

    def cudaFree(self, pointer: int) -> tuple[int]:
        return (0,)

    cudaIpcCloseMemHandle = cudaFree

    def cudaIpcMemHandle_t(self) -> Any:
        held = (ctypes.c_uint8 * 64)()
        return SimpleNamespace(held=held, getPtr=lambda: ctypes.addressof(held))

    def cudaIpcGetMemHandle(self, pointer: int) -> tuple[int, Any]:
        handle = self.cudaIpcMemHandle_t()
        ctypes.c_uint64.from_buffer(handle.held).value = pointer
        return 0, handle

    def cudaIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, Any]:
        if not self.opens:
            return 217, None
        return 0, ctypes.c_uint64.from_buffer(handle.held).value

    def cudaDeviceGetPCIBusId(self, length: int, device: int) -> tuple[int, bytes]:
        return 0, (NAMES[device] + b"\0").ljust(length)

    def cudaDeviceGetByPCIBusId(self, name: bytes) -> tuple[int, Any]:
        device = NAMES.index(name)
        return (0, device) if device in self.visible else (101, None)

    def cudaGetLastError(self) -> tuple[int]:
        return (0,)

    def cudaDeviceCanAccessPeer(self, device: int, peer: int) -> tuple[int, int]:
        return 0, int(self.peers)

    # torch's

    def as_tensor(self, array: Any, device: Any) -> torch.Tensor:
        """Asks whose memory it is only where no index says it, and copies another's."""
        pointer, _ = array.__cuda_array_interface__["data"]
        (nbytes,) = array.__cuda_array_interface__["shape"]
        seen = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
        index = torch.device(device).index
        return seen if index == self.here or self.owner[pointer] == self.here else seen.clone()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(memory_module, "_runtime", lambda: made)
    monkeypatch.setattr(torch, "as_tensor", made.as_tensor)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: made.here)
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return made


@pytest.fixture
def theirs(runtime: Runtime, tmp_path: Path) -> tuple[torch.Tensor, Path]:
    """Memory that the second GPU made, in a process of the first."""
    runtime.here = 1
    made = CudaMemory().make(tmp_path / "ring.task", NBYTES)
    runtime.here = 0
    return made, tmp_path / "ring.task"


@pytest.mark.parametrize("visible", [[0, 1], [0]])
def test_memory_of_another_gpu_is_seen_and_not_copied(
    runtime: Runtime, theirs: tuple[torch.Tensor, Path], visible: list[int]
) -> None:
    made, path = theirs
    runtime.visible = visible
    opened = CudaMemory().open(path, NBYTES)
    assert opened is not None
    opened[7] = 3
    assert made[7] == 3
    assert not path.exists()


def test_a_copy_in_the_place_of_anothers_memory_is_refused(
    runtime: Runtime, theirs: tuple[torch.Tensor, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "as_tensor", lambda array, device: runtime.as_tensor(array, "cuda"))
    with pytest.raises(StartError, match="torch copied"):
        CudaMemory().open(theirs[1], NBYTES)


def test_gpus_that_do_not_reach_each_other_lend_nothing(
    runtime: Runtime, theirs: tuple[torch.Tensor, Path]
) -> None:
    runtime.peers = False
    with pytest.raises(StartError, match=r"GPU 0000:02:00\.0 \(no peer access\).*topo -p2p r"):
        CudaMemory().open(theirs[1], NBYTES)
    # Where the other one is not seen, its handle says it.
    runtime.visible, runtime.opens = [0], False
    with pytest.raises(StartError, match=r"GPU 0000:02:00\.0 \(217\)"):
        CudaMemory().open(theirs[1], NBYTES)
