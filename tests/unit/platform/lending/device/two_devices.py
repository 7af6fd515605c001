"""Memory of the host's that passes for that of two devices, each of which a process has as its own.

Of two GPUs torch copies between, both have their streams wait for each other, and each gets a
context on the other. So nothing but kernels, which take addresses, may touch the other's memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.gpu.host_memory import HostMemory

queued = _disable_current_modes
"""Within it a kernel is launched, which takes addresses of any device."""


class TwoDevices(HostMemory):
    """A :class:`~loomserve.platform.lending.device.memory.SharedMemory`: what is opened is the
    other device's, and no operation of torch may touch it in a thread that has opened some."""

    def open(self, path: Path, nbytes: int) -> torch.Tensor | None:
        memory = super().open(path, nbytes)
        if memory is not None:
            _KeptApart(memory).__enter__()
        return memory


class _KeptApart(TorchDispatchMode):
    def __init__(self, theirs: torch.Tensor) -> None:
        super().__init__()
        # Kept, so that nothing else comes to lie at these addresses.
        self._theirs = theirs
        self._address = theirs.untyped_storage().data_ptr()

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: Any = (), named: Any = None
    ) -> Any:
        schema = function._schema
        is_view = any(
            each.alias_info is not None and not each.alias_info.is_write for each in schema.returns
        )
        given = [each for each in tree_leaves((arguments, named)) if isinstance(each, torch.Tensor)]
        if not is_view and any(self._is_theirs(each) for each in given):
            of = "two devices" if len(given) > 1 else "another device"
            raise AssertionError(f"{function}: memory of {of}")
        return function(*arguments, **(named or {}))

    def _is_theirs(self, tensor: torch.Tensor) -> bool:
        is_host = tensor.device.type == "cpu"
        return is_host and tensor.untyped_storage().data_ptr() == self._address
