"""vLLM's CPU worker that borrows from lenders and lends to borrowers, and its model runner.

No GPU's engine may import this: vLLM's own module replaces streams and events of ``torch.cuda`` by
ones that do nothing.
"""

from __future__ import annotations

from typing import Any

from vllm import envs

from loomserve.platform.engine.worker import NonSpinningWorker, SeedKeepingModelRunner
from loomserve.platform.lending.engine.cpu_attention import use_remote_attention
from loomserve.platform.lending.engine.memory.mapped import AddressSpace, MappedMemory
from loomserve.platform.lending.engine.memory.runner import HasSpareAddresses
from loomserve.platform.lending.engine.worker import SortsRows, TakesPartInLending
from loomserve.platform.lending.leaf import Leaf, ring_leaf


class RemoteAttentionModelRunner(HasSpareAddresses, SortsRows, SeedKeepingModelRunner):
    """Runs a model on a CPU, whose memory is taken by the page."""

    def page_bytes(self) -> int:
        return MappedMemory.page

    def address_space(self, nbytes: int) -> AddressSpace:
        return MappedMemory(nbytes, self.device)


class RemoteAttentionWorker(TakesPartInLending, NonSpinningWorker):
    """vLLM's CPU worker that takes part in lending."""

    runner_class = RemoteAttentionModelRunner

    def use_remote_attention(self) -> None:
        use_remote_attention()

    def leaf(self) -> Leaf:
        return ring_leaf(split_kv=envs.VLLM_CPU_ATTN_SPLIT_KV)

    def isa(self, layer: Any) -> str:
        return str(layer.isa)
