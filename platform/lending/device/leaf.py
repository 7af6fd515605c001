"""Kernels between devices of one kind."""

from __future__ import annotations

from pathlib import Path

from loomserve.platform.lending.device.borrower import KernelBorrower
from loomserve.platform.lending.device.form import Form
from loomserve.platform.lending.device.memory import SharedMemory
from loomserve.platform.lending.device.server import KernelServer
from loomserve.platform.lending.ring.ring import Ring


class KernelLeaf:
    """A :class:`~loomserve.platform.lending.leaf.Leaf` over memory that both ends map."""

    computes_layers = False

    def __init__(self, memory: SharedMemory, form: Form = Form.STREAM) -> None:
        """
        Args:
            memory: of the device.
            form: in which a lender serves tasks.
        """
        self._memory = memory
        self._form = form

    @property
    def polls(self) -> bool:
        return self._form is Form.POLLS

    def borrower(self, path: Path, patience_s: float) -> KernelBorrower:
        return KernelBorrower(Ring.attach(path), self._memory, patience_s)

    def server(self) -> KernelServer:
        return KernelServer(self._memory, self._form)
