"""Handles of CUDA's memory as bytes: without a GPU, but with the package that reaches CUDA."""

from __future__ import annotations

import pytest

from loomserve.platform.lending.device.memory import ipc_bytes, ipc_handle

pytestmark = pytest.mark.cuda_wheels


def test_a_handle_holds_the_bytes_that_it_was_made_of() -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="CUDA's wheels are not installed")
    held = bytes(range(64))
    handle = ipc_handle(held)
    assert isinstance(handle, runtime.cudaIpcMemHandle_t)
    assert ipc_bytes(handle) == held


@pytest.mark.parametrize(
    "name",
    [
        "cudaMalloc", "cudaFree", "cudaIpcGetMemHandle", "cudaIpcOpenMemHandle",
        "cudaIpcCloseMemHandle", "cudaIpcMemLazyEnablePeerAccess", "cudaHostRegister",
        "cudaHostRegisterMapped", "cudaHostUnregister", "cudaDeviceGetPCIBusId",
        "cudaDeviceGetByPCIBusId", "cudaDeviceCanAccessPeer", "cudaGetLastError",
    ],
)  # fmt: skip
def test_what_is_called_of_cuda_is_there(name: str) -> None:
    runtime = pytest.importorskip("cuda.bindings.runtime", reason="CUDA's wheels are not installed")
    assert hasattr(runtime, name)
