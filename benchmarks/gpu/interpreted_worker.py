"""A CPU engine's worker whose loans are carried by the kernels for GPUs, interpreted."""

from __future__ import annotations

from loomserve.platform.lending.device.form import Form
from loomserve.platform.lending.device.leaf import KernelLeaf
from loomserve.platform.lending.device.memory import HostMemory
from loomserve.platform.lending.engine.worker import RemoteAttentionWorker


class InterpretedWorker(RemoteAttentionWorker):
    def leaf(self) -> KernelLeaf:
        return KernelLeaf(HostMemory(), Form(self._options.gpu_form))
