"""What we override of vLLM on a CPU, its CUDA classes have, too; seen without a GPU.

Runs where vLLM's CUDA wheel is installed: ``.ci/cuda`` makes such an environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = (
    *("cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain"),
    *("cuGetErrorString", "cuGetProcAddress_v2", "cuMemAddressFree", "cuMemAddressReserve"),
    *("cuMemCreate", "cuMemGetAllocationGranularity", "cuMemMap", "cuMemRelease"),
    *("cuMemSetAccess", "cuMemUnmap", "cuPointerGetAttribute", "cuTensorMapEncodeTiled"),
)
"""Functions of the driver that vLLM's libraries are linked with."""
NO_DEVICE = 100

# What is known to differ, and must be minded when a worker for GPUs is written.
EXPECTED: dict[str, list[str]] = {}


def _has_cuda_wheel() -> bool:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


pytestmark = [
    pytest.mark.cuda_wheels,
    pytest.mark.skipif(
        not _has_cuda_wheel(), reason="vLLM's CUDA wheel is not installed here: .ci/cuda does it"
    ),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver's library whose every function finds no device."""
    compiler = shutil.which("gcc") or pytest.skip("there is no gcc to build a stub of the driver")
    folder = tmp_path_factory.mktemp("driver")
    source = folder / "stub.c"
    source.write_text("".join(f"int {name}() {{ return {NO_DEVICE}; }}\n" for name in DRIVER))
    library = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library)]
    subprocess.run([*command, str(source)], check=True)
    return folder


def test_cuda_classes_take_what_ours_override(driver: Path) -> None:
    script = Path(__file__).with_name("cuda_signatures.py")
    ran = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "LD_LIBRARY_PATH": str(driver)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {pair: differences for pair, differences in found.items() if differences} == EXPECTED
