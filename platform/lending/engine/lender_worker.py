"""A worker's end of the loans in which it is the lender, also of layers that it hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.cpu_attn import CPUAttentionMetadata

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.memory.lent import borrower_caches
from loomserve.platform.lending.engine.shards.layers import decoder_layers
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.engine.shards.weights import weights_of
from loomserve.platform.lending.engine.sliced_operators import SlicedOperators
from loomserve.platform.lending.leaf import LenderEnd
from loomserve.platform.lending.ring.attention_server import Caches
from loomserve.platform.lending.ring.geometry import GPU, Geometry
from loomserve.platform.lending.ring.lent_ring import LentRing

_BEARABLE_WAIT_S = 1e-4
"""The mean delay of a task that is borne: some 5 % of a small model's step, over its layers."""


class LenderWorker:
    """Serves borrowers from this engine's KV memory, within its steps and between them. Steps look
    for tasks only while something is lent: in attention by ``lending.poll``, and in the operators
    of the engine's own model."""

    def __init__(
        self, lending: LendingContext, server: LenderEnd, kv: LocalKv, model: nn.Module
    ) -> None:
        self._lending = lending
        self._server = server
        self._kv = kv
        self._model = model
        self._rings: dict[str, LentRing] = {}
        self._operators: SlicedOperators | None = None
        self._poll: Callable[[], Any] | None = None

    def look_for_tasks(self, polling: str) -> dict[str, Any]:
        """Choose where steps look for tasks (``lending.polling``)."""
        if self._operators is None:
            self._operators = SlicedOperators(self._model, self._server.poll)
        if polling == "steps":
            self._operators.poll_never()
        elif polling == "operators":
            self._operators.poll_only()
        else:
            self._operators.poll_in_slices(_BEARABLE_WAIT_S)
        self._poll = None if polling == "steps" else self._server.poll
        self._poll_while_lending()
        return self.slicing_plans()

    def slicing_plans(self) -> dict[str, Any]:
        """Return how operators are sliced, by kind of step; empty if they are not."""
        assert self._operators is not None
        return {kind: asdict(plan) for kind, plan in self._operators.plans.items()}

    def _poll_while_lending(self) -> None:
        assert self._operators is not None
        self._operators.use(bool(self._rings))
        self._lending.poll = self._poll if self._rings else None

    def lend(self, path: str, first_block: int, blocks: int, borrower: dict[str, Any]) -> None:
        """Make a ring at ``path``, and serve from ``blocks`` of this engine's blocks what the
        borrower asked for (:meth:`BorrowerWorker.requirements`). ``ValueError`` if its KV is of
        another type than this engine's, or its device of another kind."""
        geometry = Geometry.from_json(borrower["geometry"])
        own = self._kv.geometry.dtype
        if geometry.dtype != own:
            # What one left in a block would not be finite numbers of the other's.
            raise ValueError(f"KV of {own} has no room for a borrower's of {geometry.dtype}")
        if (geometry.isa == GPU) != (self._kv.geometry.isa == GPU):
            raise ValueError("a GPU's engine and a CPU's lend nothing to each other")
        ring = LentRing.create(
            Path(path),
            geometry,
            borrower["max_tokens"],
            borrower["max_requests"],
            borrower["max_blocks"],
        )
        caches, rows = borrower_caches(self._kv.caches, first_block, blocks, geometry)
        layers = None
        if given := borrower.get("layers"):
            of = range(*given["of"])
            layers = HostedLayers(given["model"], given["options"], of, geometry.isa, caches)
        self._server.open(ring, caches, layers, rows)
        self._rings[path] = ring
        self._poll_while_lending()

    def end_lending(self, path: str) -> None:
        ring = self._rings.pop(path)
        self._poll_while_lending()
        if self._server.close(ring):
            give_back_freed()
        ring.close()
        ring.unlink()


class HostedLayers:
    """The layers, called by :class:`AttentionServer` with one batch of the borrower's. Both
    processes read the borrower's model from the folder ``model``; ``options`` are its engine's,
    under vLLM's names. The lender's own steps wait meanwhile. The layers' attention has no
    :class:`LendingContext`, so it serves no other borrower's task within this one's. ``ValueError``
    if layers of this architecture cannot be taken out of it."""

    def __init__(
        self, model: str, options: dict[str, Any], layers: range, isa: str, caches: Caches
    ) -> None:
        self._config: VllmConfig = EngineArgs(
            model=model, enforce_eager=True, skip_tokenizer_init=True, **options
        ).create_engine_config()
        of_model = self._config.model_config
        with set_current_vllm_config(self._config), set_default_torch_dtype(of_model.dtype):
            # Memory into which nothing is read is never touched, and so takes none.
            whole = initialize_model(self._config)
            every = decoder_layers(whole)
            taken = nn.ModuleList(every[layer] for layer in layers)
            whole.load_weights(weights_of(whole, layers, self._config))
            process_weights_after_loading(taken, of_model, torch.device("cpu"))
        self._layers = list(taken)
        # The rest refers to itself, and would hold them until it is collected.
        for layer in layers:
            every[layer] = nn.Identity()
        give_back_freed()
        attention = [
            next(each for each in layer.modules() if isinstance(each, Attention))
            for layer in self._layers
        ]
        self._names = [each.layer_name for each in attention]
        for each, (key, _) in zip(attention, caches, strict=True):
            each.isa = isa
            each.kv_cache = _together(key)
        self._width = int(self._config.model_config.get_hidden_size())

    def __call__(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        slot_mapping: torch.Tensor,
        scheduler_metadata: torch.Tensor,
    ) -> None:
        tokens = len(slot_mapping)
        if (longest := int(seq_lens.max())) > (most := self._config.model_config.max_model_len):
            # There are no positions behind it.
            raise ValueError(f"a sequence of {longest} tokens exceeds the model's {most}")
        given, out = (rows.view(tokens, -1)[:, : self._width] for rows in (query, output))
        hidden, residual = given.contiguous(), out.contiguous()
        added = query_start_loc.diff()
        metadata = CPUAttentionMetadata(
            num_actual_tokens=tokens,
            max_query_len=int(added.max()),
            query_start_loc=query_start_loc,
            max_seq_len=int(seq_lens.max()),
            seq_lens=seq_lens,
            block_table=block_table,
            slot_mapping=slot_mapping,
            scheduler_metadata=scheduler_metadata,
        )
        # A sequence's new tokens are its last ones.
        first = (seq_lens - added - query_start_loc[:-1]).long()
        positions = torch.arange(tokens) + first.repeat_interleave(added)
        of_all = dict.fromkeys(self._names, metadata)
        with set_forward_context(of_all, self._config, num_tokens=tokens):
            for layer in self._layers:
                hidden, residual = layer(positions, hidden, residual)
        given.copy_(residual)
        out.copy_(hidden)


def _together(key: torch.Tensor) -> torch.Tensor:
    """Return the cache, [blocks, kv_heads, block_size, 2 * head_size], that has these keys."""
    blocks, heads, size, width = key.shape
    strides = (key.stride(0), key.stride(1), 2 * width, 1)
    return key.as_strided((blocks, heads, size, 2 * width), strides)
