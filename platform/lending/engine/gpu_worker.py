"""vLLM's GPU worker that borrows from lenders, and lends to borrowers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from loomserve.platform.engine.resumption.gpu_worker import (
    ResumingGpuModelRunner,
    ResumingGpuWorker,
)
from loomserve.platform.lending.device.memory import CudaMemory
from loomserve.platform.lending.device.pages import CudaPages
from loomserve.platform.lending.device.server import kernel_leaf
from loomserve.platform.lending.engine.gpu_attention import use_remote_attention
from loomserve.platform.lending.engine.memory.mapped import AddressSpace
from loomserve.platform.lending.engine.memory.paged import PagedMemory
from loomserve.platform.lending.engine.memory.runner import HasSpareAddresses
from loomserve.platform.lending.engine.worker import SortsRows, TakesPartInLending
from loomserve.platform.lending.leaf import Leaf
from loomserve.platform.lending.ring.geometry import GPU


class RemoteAttentionGpuModelRunner(HasSpareAddresses, SortsRows, ResumingGpuModelRunner):
    """Runs a model on a GPU, on which pages are mapped one by one."""

    @cached_property
    def _pages(self) -> CudaPages:
        return CudaPages()

    def page_bytes(self) -> int:
        return self._pages.page

    def address_space(self, nbytes: int) -> AddressSpace:
        return PagedMemory(nbytes, self._pages)


class RemoteAttentionGpuWorker(TakesPartInLending, ResumingGpuWorker):
    """Worker of an engine without graphs and asynchronous scheduling: a step's rows are divided
    differently each time, and the scheduler must see that a loan has ended before it plans the next
    step."""

    runner_class = RemoteAttentionGpuModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.vllm_config.scheduler_config.async_scheduling:
            raise ValueError("lending needs async_scheduling: false")
        if not self.model_config.enforce_eager:
            raise ValueError("lending needs enforce_eager: true")
        if self.model_config.enable_sleep_mode:
            raise ValueError("lending needs enable_sleep_mode: false: its KV memory would stay")

    def taken_bytes(self) -> int:
        # torch's allocator knows nothing of these pages.
        return super().taken_bytes() + int(self.model_runner.kv_memory.nbytes)

    def use_remote_attention(self) -> None:
        use_remote_attention()

    def leaf(self) -> Leaf:
        return kernel_leaf(CudaMemory(), resident=self._options.gpu_form == "resident")

    def isa(self, layer: Any) -> str:
        return GPU
