"""Parts of an attention backend that leave some rows, or some heads of all own rows, to lenders.

The batch's rows are sorted by partition (:mod:`.model_runner`): own rows first, then those of each
loan. Each layer first posts what is borrowed, then computes the rest, then fetches the borrowed
outputs. A head's output for one sequence depends on nothing else, so it is the same to the bit
wherever it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from loomserve.platform.lending.engine.block_partitions import OWN, Partitions
from loomserve.platform.lending.engine.shards.heads import RemoteHeads
from loomserve.platform.lending.engine.shards.shard import RemoteShard
from loomserve.platform.lending.ring.borrower import Borrower


@dataclass
class LendingContext:
    """The loans of one engine as its worker's process sees them. The worker makes one and hands it
    to its model runner and to its model's attention layers. Only the worker's own methods write it,
    between two steps. Attention layers of a borrower's model that are hosted here have none: they
    serve, and are not served within."""

    patience_s: float = 0.1  # a lender that takes longer for one layer is given up
    partitions: Partitions = field(default_factory=lambda: Partitions([0], 0))
    """Which block lies where; empty until there is KV memory."""
    borrowers: dict[int, Borrower] = field(default_factory=dict)
    """By partition, this engine's end of the ring to the lender that holds it."""
    shard: RemoteShard | None = None  # heads or layers that a lender computes for all own requests
    poll: Callable[[], Any] | None = None
    """Serves waiting tasks of this engine's borrowers, if attention looks for such."""


def share_context(layers: dict[str, Any], context: LendingContext) -> None:
    for layer in layers.values():
        if isinstance(impl := getattr(layer, "impl", None), AttendsRemotely):
            impl.lending = context


@dataclass(frozen=True)
class RemoteRows:
    """The rows of a batch whose attention one lender computes."""

    borrower: Borrower
    tokens: slice


@dataclass(frozen=True)
class RemoteAttentionMetadata:
    own: Any | None  # vLLM's for own rows, and their heads that stay here, if there are such rows
    own_tokens: int  # rows of the batch that are own ones, the first
    heads: RemoteHeads | None  # of own rows, that a lender computes
    borrowed: list[RemoteRows]  # the other rows, by lender
    layers: dict[str, int]  # the number of each, by its name


class DividesBatch:
    """Part of a metadata builder: divides a batch by partition, once a step."""

    layer_names: list[str]
    vllm_config: Any
    block_size: int
    head_numbers = ("num_heads", "num_kv_heads")
    """The builder's attributes with the numbers of query heads and of KV heads."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        build: Callable[..., Any] = super().build  # type: ignore[misc]
        common, lending = common_attn_metadata, self._lending
        if lending is None:
            return build(common_prefix_len, common, fast_build)
        ends = _ends_of_partitions(common, lending)
        if lending.shard is None and set(ends) <= {OWN}:
            return build(common_prefix_len, common, fast_build)
        own_requests = ends.pop(OWN, 0)
        own_tokens = int(common.query_start_loc_cpu[own_requests])
        own, heads = None, None
        if own_requests:
            own_rows = _first_requests(common, own_requests, own_tokens)
            heads = _begin_shard_step(lending, own_rows)
            with self._only(heads):
                own = build(0, own_rows, fast_build)
        borrowed, first = [], own_requests
        for partition, end in ends.items():
            borrowed.append(self._begin_loan_step(lending, common, partition, first, end))
            first = end
        return RemoteAttentionMetadata(
            own, own_tokens, heads, borrowed, {name: i for i, name in enumerate(self.layer_names)}
        )

    @property
    def _lending(self) -> LendingContext | None:
        """What the worker handed to the layers of this builder's group."""
        layers = self.vllm_config.compilation_config.static_forward_context
        impl = layers[self.layer_names[0]].impl
        return impl.lending if isinstance(impl, AttendsRemotely) else None

    @contextmanager
    def _only(self, heads: RemoteHeads | None) -> Iterator[None]:
        before = [getattr(self, name) for name in self.head_numbers]
        if heads is not None:
            kept = (heads.kept.query_heads, heads.kept.kv_heads)
            for name, number in zip(self.head_numbers, kept, strict=True):
                setattr(self, name, number)
        try:
            yield
        finally:
            for name, number in zip(self.head_numbers, before, strict=True):
                setattr(self, name, number)

    def _begin_loan_step(
        self,
        lending: LendingContext,
        common: CommonAttentionMetadata,
        partition: int,
        first: int,
        end: int,
    ) -> RemoteRows:
        """Tell the lender of ``partition`` what the rows of requests ``first`` to ``end`` are."""
        starts = common.query_start_loc[first : end + 1]
        tokens = slice(*common.query_start_loc_cpu[[first, end]].tolist())
        base = lending.partitions.ranges[partition].start
        borrower = lending.borrowers[partition]
        borrower.begin_step(
            starts - starts[0],
            common.seq_lens[first:end],
            # What stands behind a sequence's last block means nothing.
            (common.block_table_tensor[first:end] - base).clamp_(min=0),
            common.slot_mapping[tokens] - base * self.block_size,
        )
        return RemoteRows(borrower, tokens)


def _begin_shard_step(lending: LendingContext, own: CommonAttentionMetadata) -> RemoteHeads | None:
    """Tell the lender of a shard that is away what the step's rows are. Returns the shard if it is
    of heads, which this engine's attention must leave out."""
    shard = lending.shard
    if shard is not None:
        shard.borrower.begin_step(
            own.query_start_loc, own.seq_lens, own.block_table_tensor, own.slot_mapping
        )
    return shard if isinstance(shard, RemoteHeads) else None


def _ends_of_partitions(common: CommonAttentionMetadata, lending: LendingContext) -> dict[int, int]:
    """By partition, the index behind its last request, as requests are sorted by partition."""
    if not lending.borrowers:
        return {OWN: common.num_reqs}
    of = lending.partitions.of
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


class AttendsRemotely:
    """Part of one layer's attention: posts borrowed rows, computes own ones, fetches the
    borrowed."""

    lending: LendingContext | None = None
    """Set by the worker; None in layers of another engine's model that are hosted here."""
    kv_sharing_target_layer_name: str | None
    do_kv_cache_update: Callable[..., None]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output
        lending = self.lending
        if lending is not None and lending.poll is not None:
            lending.poll()
        if lending is None or not isinstance(attn_metadata, RemoteAttentionMetadata):
            self._own(layer, query, key, value, kv_cache, attn_metadata, output)
            return output
        number = attn_metadata.layers[layer.layer_name]
        for remote in attn_metadata.borrowed:
            rows = remote.tokens
            remote.borrower.post(number, query[rows], key[rows], value[rows])
        if attn_metadata.own is not None:
            rows = slice(attn_metadata.own_tokens)
            self._own_rows(
                layer, query[rows], key[rows], value[rows], kv_cache, attn_metadata, output[rows]
            )
        for remote in attn_metadata.borrowed:
            if not remote.borrower.wait(output[remote.tokens], lending.patience_s):
                # The scheduler drops what comes of these rows; they must only not be poison.
                output[remote.tokens].zero_()
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
        assert self.lending is not None
        q, kv = heads.kept.query_heads, heads.kept.kv_heads
        number = metadata.layers[layer.layer_name]
        heads.borrower.post(number, query[:, q:], key[:, kv:], value[:, kv:])
        # The kernel writes heads that lie side by side.
        stay = torch.empty_like(output[:, :q], memory_format=torch.contiguous_format)
        self._own(layer, query[:, :q], key[:, :kv], value[:, :kv], kv_cache, own, stay)
        output[:, :q] = stay
        if not heads.borrower.wait(output[:, q:], self.lending.patience_s):
            output[:, q:].zero_()

    def _own(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> None:
        # vLLM does so in an op of its own where a backend leaves it to it.
        if self.kv_sharing_target_layer_name is None and key is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, metadata.slot_mapping)
        super().forward(layer, query, key, value, kv_cache, metadata, output)  # type: ignore[misc]
