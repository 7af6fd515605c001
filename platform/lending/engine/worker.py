"""vLLM's CPU worker that borrows from lenders, and lends to borrowers, while it runs its own steps.

Its engine's scheduler divides the same block address space (:mod:`borrowing`, :mod:`lending`); the
calls that open and end loans come to both of them through the executor (:mod:`executor`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.kv_cache_interface import KVCacheConfig

from loomserve.kvstore.engine.connector import StoreConnector
from loomserve.kvstore.engine.connector_worker import StoreConnectorWorker
from loomserve.kvstore.engine.memory import KvMemory
from loomserve.platform.engine.seeds import SeedKeepingModelRunner
from loomserve.platform.engine.worker import NonSpinningWorker
from loomserve.platform.lending.engine.attention import LENDING, use_remote_attention
from loomserve.platform.lending.engine.block_partitions import OWN, borrowed_sides
from loomserve.platform.lending.engine.hosted_layers import HostedLayers
from loomserve.platform.lending.engine.memory.block_copy import BlockMover
from loomserve.platform.lending.engine.memory.freed import give_back
from loomserve.platform.lending.engine.memory.lent import borrower_caches
from loomserve.platform.lending.engine.memory.mapped import MappedMemory
from loomserve.platform.lending.engine.shards.heads import (
    RemoteHeads,
    geometry_of_heads,
    room_without_heads,
)
from loomserve.platform.lending.engine.shards.layers import (
    RemoteLayers,
    check_layers,
    decoder_layers,
    room_without,
)
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.engine.shards.store_memory import ShardedMemory
from loomserve.platform.lending.engine.shards.weights import LayerWeights
from loomserve.platform.lending.engine.sliced_operators import SlicedOperators
from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.geometry import Geometry
from loomserve.platform.lending.ring.ring import Ring
from loomserve.platform.state.lending_options import LENDING_CONFIG, LendingOptions, ShardSpec

_BEARABLE_WAIT_S = 1e-4
"""The mean delay of a guest's task: some 5 % of a small model's step, over its layers."""


class RemoteAttentionModelRunner(SeedKeepingModelRunner):
    """Puts the requests of a batch in order of their sides, own ones first.

    Its KV memory has address space for all block numbers, and memory for its own blocks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_memory = MappedMemory()

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, kernel_block_sizes: list[int], *_: Any, **__: Any
    ) -> dict[str, torch.Tensor]:
        caches: dict[str, torch.Tensor] = super().initialize_kv_cache_tensors(
            kv_cache_config, kernel_block_sizes, kv_cache_allocation_context=self.kv_memory
        )
        for cache in caches.values():
            cache.zero_()  # what there is no memory for shall be known now
        return caches

    def _may_reorder_batch(self, scheduler_output: Any) -> None:
        super()._may_reorder_batch(scheduler_output)
        if LENDING.borrowers and LENDING.sides is not None:
            batch = self.input_batch
            first = batch.block_table[0].block_table.np[: batch.num_reqs, 0]
            _sort_rows(batch, [LENDING.sides.of(block) for block in first.tolist()])


def _sort_rows(batch: Any, sides: list[int]) -> None:
    """By as many swaps as rows are out of place."""
    for place, side in enumerate(sorted(sides)):
        if sides[place] != side:
            other = max(i for i, each in enumerate(sides) if each == side)
            batch.swap_states(place, other)
            sides[place], sides[other] = sides[other], sides[place]


class RemoteAttentionWorker(NonSpinningWorker):
    """One device's worker, whose attention may be computed elsewhere, and others' here."""

    runner_class = RemoteAttentionModelRunner

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lending = LendingOptions.model_validate(
            self.vllm_config.additional_config[LENDING_CONFIG]
        )
        use_remote_attention()
        LENDING.patience_s = self._lending.patience_ms / 1000
        self._server = AttentionServer(split_kv=envs.VLLM_CPU_ATTN_SPLIT_KV)
        self._lent: dict[str, Ring] = {}
        self._moving: dict[int, RemoteShard] = {}
        self._parts: SlicedOperators | None = None
        self._poll: Callable[[], Any] | None = None

    # Memory

    def determine_available_memory(self) -> int:
        """Of its own and of lenders together, since vLLM makes one block address space of it."""
        return int(super().determine_available_memory()) + self._lending.borrow_bytes

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        LENDING.sides = borrowed_sides(kv_cache_config, self._lending)
        self._allocate_own_only(kv_cache_config, len(LENDING.sides.ranges[OWN]))
        super().initialize_from_config(kv_cache_config)

    def _allocate_own_only(self, config: KVCacheConfig, own: int) -> None:
        longest = self.model_config.max_model_len
        size = config.kv_cache_groups[0].kv_cache_spec.block_size
        if own * size < longest:
            raise ValueError(
                f"its own KV memory holds {own * size} tokens, fewer than one request's "
                f"{longest}: raise kv_cache_memory or lower max_model_len"
            )
        # A layer's memory begins where the one before would end if it had a block for each number.
        config.num_blocks = own

    def compile_or_warm_up_model(self) -> Any:
        if self._lending.lend_bytes:
            # Timing and packing take seconds, which requests would wait at the first loan.
            self.look_for_tasks(self._lending.polling)
        return super().compile_or_warm_up_model()

    # The borrower's part

    def borrowing(self, part: ShardSpec | None = None) -> dict[str, Any]:
        """What a lender must know: the attention's geometry, and how large a step may be.

        Args:
            part: what of all requests it shall have; None: all of some.

        Raises:
            ValueError: that part cannot be lent.
        """
        limits = self.vllm_config.scheduler_config
        table = self.model_runner.input_batch.block_table[0].block_table.np
        assert LENDING.sides is not None
        own = len(LENDING.sides.ranges[OWN])
        extra = sum(len(each) for each in LENDING.sides.ranges[1:2])
        guest: dict[str, Any] = {
            "max_tokens": limits.max_num_batched_tokens,
            "max_requests": limits.max_num_seqs,
            "max_blocks": int(table.shape[1]),
        }
        geometry, blocks, least = self._geometry(), extra, own if part else 1
        # Of a part there is a share of each block, and there are more blocks for it.
        if part and "heads" in part:
            every, geometry = geometry, geometry_of_heads(geometry, part["heads"])
            blocks = min(room_without_heads(own, every, geometry.kv_heads), own + extra)
        elif part:
            layers = range(*part["layers"])
            check_layers(layers, geometry, self.model_config.get_hidden_size())
            blocks = min(room_without(layers, own, geometry, self._weights()), own + extra)
            geometry = replace(geometry, layers=len(layers))
            guest["layers"] = {"of": part["layers"], **self._model()}
        return {"geometry": geometry.to_json(), "blocks": blocks, "least": least, **guest}

    def _model(self) -> dict[str, Any]:
        model = self.model_config
        options = {
            "dtype": str(model.dtype).removeprefix("torch."),
            "max_model_len": model.max_model_len,
            "block_size": self.cache_config.block_size,
        }
        return {"model": model.model, "options": options}

    def _geometry(self) -> Geometry:
        layers = self._attention_layers()
        layer = layers[0]
        return Geometry(
            layers=len(layers),
            query_heads=layer.impl.num_heads,
            kv_heads=layer.impl.num_kv_heads,
            head_size=layer.impl.head_size,
            block_size=self.cache_config.block_size,
            dtype=str(self.model_config.dtype).removeprefix("torch."),
            scale=layer.impl.scale,
            isa=layer.isa,
        )

    def _attention_layers(self) -> list[Any]:
        context = self.vllm_config.compilation_config.static_forward_context
        return [context[name] for name in self._layer_names]

    @property
    def _layer_names(self) -> list[str]:
        return list(self.model_runner.kv_cache_config.kv_cache_groups[0].layer_names)

    def move_blocks(self, source: int, target: int, pairs: list[tuple[int, int]]) -> bool:
        """Copy blocks from one side to another (:meth:`BlockMover.move`)."""
        assert LENDING.sides is not None
        mover = BlockMover(
            self.model_runner.kv_caches,
            self._geometry(),
            LENDING.sides,
            LENDING.borrowers,
            LENDING.patience_s,
        )
        return mover.move(source, target, pairs)

    def borrow(self, side: int, path: str) -> None:
        LENDING.borrowers[side] = Borrower(Ring.attach(Path(path)))

    def end_loan(self, side: int) -> None:
        part = self._moving.pop(side, None)
        borrower = part.borrower if part is not None else LENDING.borrowers.pop(side)
        borrower.ring.close()

    # Parts of all requests' attention that move to a lender, and back

    def begin_part(self, side: int, path: str, part: ShardSpec) -> int:
        """Get ready to move it there; how many own blocks there are once it is away.

        Args:
            side: the lender's.
            path: of its ring.
            part: what moves.
        """
        self._moving[side] = moved = self._moved(Borrower(Ring.attach(Path(path))), part)
        return moved.blocks

    def _moved(self, borrower: Borrower, part: ShardSpec) -> RemoteShard:
        assert LENDING.sides is not None
        here = (
            self._attention_layers(),
            self.model_runner.kv_caches,
            self.model_runner.kv_memory.release,
            LENDING.sides.ranges[-1].stop,
        )
        if "heads" in part:
            return RemoteHeads(*here, self._geometry(), borrower, LENDING.patience_s)
        return RemoteLayers(
            decoder_layers(self.model_runner.get_model()),
            range(*part["layers"]),
            self._geometry(),
            self._weights(),
            *here,
            borrower,
            LENDING.patience_s,
        )

    def _weights(self) -> LayerWeights:
        model = self.model_runner.get_model()
        return LayerWeights(model, decoder_layers(model), self.vllm_config)

    def prepare_home(self, side: int) -> bool:
        return self._moving[side].prepare_home()

    def send_part(self, side: int, blocks: list[int]) -> bool:
        return self._moving[side].send(blocks)

    def fetch_part(self, side: int, blocks: list[int]) -> bool:
        return self._moving[side].fetch(blocks)

    def copy_with_part(self, side: int, pairs: list[tuple[int, int]]) -> bool:
        return self._moving[side].copy(pairs)

    def leave_part(self, side: int, rest: list[int]) -> bool:
        """Copy the rest, and have it computed there from now on."""
        assert LENDING.sides is not None
        part, store = self._moving[side], self._store()
        if store is not None:
            store.settle()
        if rest and not part.send(rest):
            return False
        part.leave()
        LENDING.sides.join(side)
        LENDING.part = part
        if store is not None:
            store.use(ShardedMemory(part, store.memory, self._geometry()))
        return True

    def let_go_of_part(self, side: int) -> bool:
        return self._moving[side].let_go()

    def bring_part(self, side: int, rest: list[int]) -> bool:
        """Copy the rest back, and compute all of it here from now on."""
        assert LENDING.sides is not None
        part = self._moving[side]
        if rest and not part.fetch(rest):
            return False
        part.come_home()
        LENDING.sides.separate(side)
        LENDING.part = None
        if (store := self._store()) is not None:
            caches = self.model_runner.kv_caches
            store.use(KvMemory(dict(zip(self._layer_names, caches, strict=True))))
        return True

    def _store(self) -> StoreConnectorWorker | None:
        """What copies blocks to the KV store and from it, if this engine has one."""
        connector = get_kv_transfer_group() if has_kv_transfer_group() else None
        return connector.connector_worker if isinstance(connector, StoreConnector) else None

    # The lender's part

    def look_for_tasks(self, polling: str) -> dict[str, Any]:
        """Look for guests' tasks there while any are; returns how operators are cut, if so."""
        if self._parts is None:
            self._parts = SlicedOperators(self.model_runner.get_model(), self._server.poll)
        if polling == "steps":
            self._parts.poll_never()
        elif polling == "operators":
            self._parts.poll_only()
        else:
            self._parts.cut(0.0, 0.0, _BEARABLE_WAIT_S)
        self._poll = None if polling == "steps" else self._server.poll
        self._weave()
        return self.operator_plans()

    def operator_plans(self) -> dict[str, Any]:
        """How operators are cut; empty if they are not."""
        assert self._parts is not None
        return {kind: asdict(plan) for kind, plan in self._parts.plans.items()}

    def _weave(self) -> None:
        """Steps look for tasks while there are guests, and only then."""
        assert self._parts is not None
        self._parts.use(bool(self._lent))
        LENDING.poll = self._poll if self._lent else None

    def lend(self, path: str, first_block: int, blocks: int, guest: dict[str, Any]) -> None:
        """Serve a borrower from these blocks of this engine's KV."""
        geometry = Geometry.from_json(guest["geometry"])
        own = self._geometry().dtype
        if geometry.dtype != own:
            # What one left in a block would not be finite numbers of the other's.
            raise ValueError(f"KV of {own} has no room for a guest's of {geometry.dtype}")
        ring = Ring.create(
            Path(path), geometry, guest["max_tokens"], guest["max_requests"], guest["max_blocks"]
        )
        caches, rows = borrower_caches(self.model_runner.kv_caches, first_block, blocks, geometry)
        layers = None
        if given := guest.get("layers"):
            of = range(*given["of"])
            layers = HostedLayers(given["model"], given["options"], of, geometry.isa, caches)
        self._server.open(ring, caches, layers, rows)
        self._lent[path] = ring
        self._weave()

    def end_lending(self, path: str) -> None:
        ring = self._lent.pop(path)
        self._weave()
        if self._server.close(ring):
            give_back()
        ring.close()
        ring.unlink()

    def process_id(self) -> int:
        return os.getpid()

    # A step

    def execute_model(self, scheduler_output: Any) -> Any:
        self._server.busy()
        output = super().execute_model(scheduler_output)
        if output is not None:
            # Nothing to sample, so sample_tokens is not called.
            self._server.idle()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        try:
            return super().sample_tokens(grammar_output)
        finally:
            self._server.idle()

    def shutdown(self) -> None:
        self._server.stop()
        super().shutdown()
