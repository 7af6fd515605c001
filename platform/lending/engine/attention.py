"""vLLM's CPU attention, of which some rows, or some heads of all own rows, are computed by lenders.

The batch's rows stand in order of their sides (:mod:`woven_worker`): own rows first, then those of
each loan. In each layer what is borrowed is posted before the rest is computed, and fetched after.
A result depends on nothing but its own sequence and head, so where it is computed changes no bit of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from loomserve.platform.lending.engine.block_partitions import OWN, Sides
from loomserve.platform.lending.engine.shards.heads import RemoteHeads
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.ring.borrower import Borrower


def use_remote_attention() -> None:
    """Let this process's engine take the backend below; vLLM's CPU platform knows one only."""
    register_backend(AttentionBackendEnum.CPU_ATTN, f"{__name__}.RemoteAttentionBackend")


@dataclass
class LendingContext:
    """The worker's view of what its engine borrows; ``sides`` is None until it has KV memory."""

    sides: Sides | None = None
    borrowers: dict[int, Borrower] = field(default_factory=dict)
    part: RemoteShard | None = None
    """Heads or layers of the own rows that a lender computes, while they are away."""
    patience_s: float = 0.1
    poll: Callable[[], Any] | None = None
    """Looks for guests' tasks before this engine's own attention."""


LENDING = LendingContext()
"""Of the one engine whose worker this process is: vLLM hands its backends nothing of ours."""


@dataclass(frozen=True)
class RemoteRows:
    """The rows of a batch that one lender computes."""

    borrower: Borrower
    tokens: slice


@dataclass(frozen=True)
class RemoteAttentionMetadata:
    """Of a batch with borrowed rows or heads: vLLM's own metadata for the own rows, if there are
    any, and for those heads of theirs that stay."""

    own: CPUAttentionMetadata | None
    own_tokens: int
    heads: RemoteHeads | None
    borrowed: list[RemoteRows]
    layers: dict[str, int]


class RemoteAttentionBackend(CPUAttentionBackend):  # type: ignore[misc]
    """Named as vLLM's, which it replaces."""

    # So that query, key and value come together, and are posted before own rows are computed.
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_impl_cls() -> type[RemoteAttentionImpl]:
        return RemoteAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RemoteAttentionBuilder]:
        return RemoteAttentionBuilder


class RemoteAttentionBuilder(CPUAttentionMetadataBuilder):  # type: ignore[misc]
    """Divides a batch by sides, once a step."""

    layer_names: list[str]
    num_heads: int
    num_kv_heads: int

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CPUAttentionMetadata | RemoteAttentionMetadata:
        common = common_attn_metadata
        ends = _ends_of_sides(common)
        if LENDING.part is None and set(ends) <= {OWN}:
            return super().build(common_prefix_len, common, fast_build)
        own_requests = ends.pop(OWN, 0)
        own_tokens = int(common.query_start_loc[own_requests])
        own, heads = None, None
        if own_requests:
            own_rows = _first_requests(common, own_requests, own_tokens)
            heads = self._begin_part(own_rows)
            with self._only(heads):
                own = super().build(0, own_rows, fast_build)
        borrowed, first = [], own_requests
        for side, end in ends.items():
            borrowed.append(self._post_metadata(common, side, first, end))
            first = end
        return RemoteAttentionMetadata(
            own, own_tokens, heads, borrowed, {name: i for i, name in enumerate(self.layer_names)}
        )

    def _begin_part(self, own: CommonAttentionMetadata) -> RemoteHeads | None:
        """Tell the lender of a part that is away what the step's rows are; the heads, if so."""
        part = LENDING.part
        if part is not None:
            part.borrower.begin_step(
                own.query_start_loc, own.seq_lens, own.block_table_tensor, own.slot_mapping
            )
        return part if isinstance(part, RemoteHeads) else None

    @contextmanager
    def _only(self, heads: RemoteHeads | None) -> Iterator[None]:
        """Within, the attention has only those heads that stay."""
        before = self.num_heads, self.num_kv_heads
        if heads is not None:
            self.num_heads, self.num_kv_heads = heads.kept.query_heads, heads.kept.kv_heads
        try:
            yield
        finally:
            self.num_heads, self.num_kv_heads = before

    def _post_metadata(
        self, common: CommonAttentionMetadata, side: int, first: int, end: int
    ) -> RemoteRows:
        assert LENDING.sides is not None
        starts = common.query_start_loc[first : end + 1]
        tokens = slice(int(starts[0]), int(starts[-1]))
        base = LENDING.sides.ranges[side].start
        borrower = LENDING.borrowers[side]
        borrower.begin_step(
            starts - starts[0],
            common.seq_lens[first:end],
            # What stands behind a sequence's last block means nothing.
            (common.block_table_tensor[first:end] - base).clamp_(min=0),
            common.slot_mapping[tokens] - base * self.block_size,
        )
        return RemoteRows(borrower, tokens)


def _ends_of_sides(common: CommonAttentionMetadata) -> dict[int, int]:
    """By side, the request behind its last one; the sides are in order."""
    if not LENDING.borrowers or LENDING.sides is None:
        return {OWN: common.num_reqs}
    of = LENDING.sides.of
    return {
        of(block): i + 1
        for i, block in enumerate(common.block_table_tensor[: common.num_reqs, 0].tolist())
    }


def _first_requests(
    common: CommonAttentionMetadata, requests: int, tokens: int
) -> CommonAttentionMetadata:
    return replace(
        common,
        query_start_loc=common.query_start_loc[: requests + 1],
        query_start_loc_cpu=common.query_start_loc_cpu[: requests + 1],
        seq_lens=common.seq_lens[:requests],
        num_reqs=requests,
        num_actual_tokens=tokens,
        block_table_tensor=common.block_table_tensor[:requests],
        slot_mapping=common.slot_mapping[:tokens],
    )


class RemoteAttentionImpl(CPUAttentionBackendImpl):  # type: ignore[misc]
    """One layer's attention: posts borrowed rows, computes own ones, fetches the borrowed."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | RemoteAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        if LENDING.poll is not None:
            LENDING.poll()
        if not isinstance(attn_metadata, RemoteAttentionMetadata):
            self._own(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        number = attn_metadata.layers[layer.layer_name]
        for part in attn_metadata.borrowed:
            rows = part.tokens
            part.borrower.post(number, query[rows], key[rows], value[rows])
        if attn_metadata.own is not None:
            rows = slice(attn_metadata.own_tokens)
            self._own_rows(
                layer, query[rows], key[rows], value[rows], kv_cache, attn_metadata, output[rows]
            )
        for part in attn_metadata.borrowed:
            if not part.borrower.wait(output[part.tokens], LENDING.patience_s):
                # The scheduler drops what comes of these rows; they must only not be poison.
                output[part.tokens].zero_()
        return output

    def _own_rows(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: RemoteAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        own, heads = metadata.own, metadata.heads
        assert own is not None
        if heads is None:
            self._own(layer, query, key, value, kv_cache, own, output)
            return
        q, kv = heads.kept.query_heads, heads.kept.kv_heads
        number = metadata.layers[layer.layer_name]
        heads.borrower.post(number, query[:, q:], key[:, kv:], value[:, kv:])
        # The kernel writes heads that lie side by side.
        stay = torch.empty_like(output[:, :q], memory_format=torch.contiguous_format)
        self._own(layer, query[:, :q], key[:, :kv], value[:, :kv], kv_cache, own, stay)
        output[:, :q] = stay
        if not heads.borrower.wait(output[:, q:], LENDING.patience_s):
            output[:, q:].zero_()

    def _own(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: CPUAttentionMetadata,
        output: torch.Tensor,
    ) -> None:
        # vLLM does so in an op of its own where a backend leaves it to it.
        if self.kv_sharing_target_layer_name is None and key is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, metadata.slot_mapping)
        super().forward(layer, query, key, value, kv_cache, metadata, output)
