"""What vLLM's CUDA classes take, printed as JSON; a process of its own, with a stub of the driver.

vLLM imports its CUDA code where a GPU is, so it is told of one of capability 9.0, of which nobody
asks more than that.
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from typing import Any

import vllm.platforms
from vllm.platforms.cuda import NonNvmlCudaPlatform
from vllm.platforms.interface import DeviceCapability


class _Hopper(NonNvmlCudaPlatform):  # type: ignore[misc]
    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)


# Ours, vLLM's class that it subclasses on a CPU, and the one that it would on a GPU.
PAIRS = (
    (
        "loomserve.platform.lending.engine.cpu_attention:RemoteAttentionImpl",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl",
    ),
    (
        "loomserve.platform.lending.engine.cpu_attention:RemoteAttentionImpl",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl",
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl",
    ),
    (
        "loomserve.platform.lending.engine.cpu_attention:RemoteAttentionBuilder",
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder",
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder",
    ),
    (
        "loomserve.platform.lending.engine.cpu_worker:RemoteAttentionModelRunner",
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner",
    ),
    (
        "loomserve.platform.lending.engine.cpu_worker:RemoteAttentionWorker",
        "vllm.v1.worker.cpu_worker:CPUWorker",
        "vllm.v1.worker.gpu_worker:Worker",
    ),
)


def main() -> None:
    vllm.platforms._current_platform = _Hopper()
    found = {
        f"{ours} -> {there}": list(differences(ours, here, there)) for ours, here, there in PAIRS
    }
    json.dump(found, sys.stdout)


def differences(ours: str, here: str, there: str) -> Iterator[str]:
    """Each method that ours overrides and the GPU's class has not, or with other parameters."""
    own, cpu, gpu = (load(name) for name in (ours, here, there))
    overridden = 0
    for of in own.__mro__[: own.__mro__.index(cpu)]:
        for name, method in vars(of).items():
            if not callable(method) or getattr(cpu, name, None) is None or name == "__init__":
                continue
            overridden += 1
            if not hasattr(gpu, name):
                yield f"there is no {name}"
            elif parameters(cpu, name) != parameters(gpu, name):
                yield f"{name}({', '.join(parameters(gpu, name))})"
    if not overridden:
        yield "ours overrides nothing"


def parameters(of: type, method: str) -> list[str]:
    return list(inspect.signature(getattr(of, method)).parameters)


def load(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


if __name__ == "__main__":
    main()
