"""A CPU's kernels in the place of Triton's: importing this registers them, once for all forks.

vLLM's worker registers them as it begins, and looks through all that is imported for who holds one:
half a second of a core for each engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.platforms import current_platform
from vllm.triton_utils import dispatcher

_register = dispatcher.register_kernels


def _register_others(overrides: Mapping[str, Any]) -> None:
    """Those that are not registered yet."""
    known = {name: implementation for name, (_, implementation) in dispatcher._registry.items()}
    if left := {name: each for name, each in overrides.items() if known.get(name) is not each}:
        _register(left)


current_platform.register_triton_kernel_overrides()
dispatcher.register_kernels = _register_others
