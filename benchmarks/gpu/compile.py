"""The kernels compiled ahead of time, with or without a GPU: do they, and how large are they?

A second argument is a folder, which gets the PTX and the cubins for sm_90.
"""

from __future__ import annotations

import os

# This step compiles where the others interpret; before Triton is imported.
os.environ["TRITON_INTERPRET"] = "0"

# isort: split
import re
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks.gpu import flags, probe
from benchmarks.gpu.step import HAS_GPU, Results, main
from loomserve.platform.lending.cuda.ahead import compiled
from loomserve.platform.lending.cuda.buffer import TaskShape

ORDERED = re.compile(r"\b(?:atom|ld)\.global\.(?:sys|gpu)\.[a-z_.0-9]+")
OWN = {
    flags.ping_pong: {"own": "*i64", "other": "*i64", "times": "*i64"},
    flags.nothing: {"word": "*i64"},
    probe.sample_clock: {"times": "*i64"},
}


def own(capability: int) -> dict[str, Any]:
    """The kernels of other steps."""
    found = {}
    for kernel, pointers in OWN.items():
        signature = {p.name: pointers.get(p.name, "i32") for p in kernel.params}
        found[kernel.fn.__name__] = triton.compile(
            ASTSource(kernel, signature),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": 1},
        )
    return found


def keep(kernels: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, one in kernels.items():
        (folder / f"{name}.ptx").write_text(one.asm["ptx"])
        (folder / f"{name}.cubin").write_bytes(one.asm["cubin"])


def compile_all(results: Results) -> None:
    results.add("form", "compiled, not run")
    shape = TaskShape(
        layers=32, query_heads=32, kv_heads=8, head_size=128, block_size=16,
        dtype=torch.bfloat16, scale=128**-0.5, max_rows=128, max_requests=128, max_blocks=512,
    )  # fmt: skip
    capabilities = {80, 90}
    if HAS_GPU:
        major, minor = torch.cuda.get_device_capability()
        capabilities.add(10 * major + minor)
    for capability in sorted(capabilities):
        kernels = compiled(shape, capability) | own(capability)
        found = {
            name: {
                "cubin_bytes": len(one.asm["cubin"]),
                "shared_bytes": one.metadata.shared,
                "ordered": sorted(set(ORDERED.findall(one.asm["ptx"]))),
            }
            for name, one in kernels.items()
        }
        results.add(f"sm_{capability}", found)
        if capability == 90 and len(sys.argv) > 2:
            keep(kernels, Path(sys.argv[2]))
    names = ", ".join(f"sm_{capability}" for capability in sorted(capabilities))
    results.end(f"{len(kernels)} kernels for {names}")


if __name__ == "__main__":
    main(compile_all)
