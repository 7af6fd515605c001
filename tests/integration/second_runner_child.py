"""An engine's process with vLLM's second model runner, on a CPU, whose kernels Triton interprets.

vLLM has that runner for GPUs, and for CPUs where Triton compiles for them.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from types import SimpleNamespace
from typing import Any


def _interpret_triton() -> None:
    """Have vLLM find a Triton for CPUs, which is imported as one that interprets."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    for backend in backends.values():
        backend.driver.is_active = staticmethod(lambda: False)
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
    version = importlib.metadata.version

    def version_for_cpus(name: str) -> Any:
        return "0.32.0+cpu" if name == "vllm" else version(name)

    importlib.metadata.version = version_for_cpus
    import triton.language as tl
    from triton.language.extra import libdevice

    # A function of CUDA's, of which the interpreter makes nothing.
    libdevice.log1p = lambda x: tl.log(1.0 + x)


def main(control: int, parent: int) -> None:
    _interpret_triton()
    from loomserve.platform.engine.core import child
    from loomserve.platform.run.fate import end_with

    end_with(parent)
    child.main(control)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
