"""State of the KV store."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from pydantic import Field

from loomserve.platform.state.base import StateModel


class KvModelState(StateModel):
    """KV blocks of a model in the store; hits, misses and evictions since the store started."""

    model: str
    blocks_in_memory: int
    blocks_on_ssd: int
    bytes_in_memory: int
    bytes_on_ssd: int
    hit_blocks: int = Field(description="Blocks that engines looked up and found.")
    missed_blocks: int = Field(description="Blocks that engines looked up and did not find.")
    evicted_blocks: int = Field(description="Blocks that left memory to make room.")


class KvPeerState(StateModel):
    """The store of another node, and what fetches from it take."""

    node: str
    fetches: int = Field(description="Fetches whose time is known.")
    setup_s: float = Field(description="Seconds until a fetch begins.")
    bytes_per_s: float = Field(description="From then on.")


class KvNetworkState(StateModel):
    """A store among those of other nodes; fetches since it started."""

    node: str = Field(description="The node whose store this is.")
    peers: tuple[KvPeerState, ...]
    directory_blocks: int = Field(description="Blocks of other nodes that it knows of.")
    missed_messages: int = Field(
        description="Announcements that were missed, after which all contents were asked for."
    )
    fetched_blocks: int
    fetched_bytes: int
    failed_fetches: dict[str, int] = Field(description="Fetches that brought less, by reason.")


class KvState(StateModel):
    """The KV store: behind ``GET /admin/v1/kv`` and ``loomserve admin kv``."""

    capacity_bytes: int = Field(description="Shared memory for blocks.")
    used_bytes: int
    ssd_capacity_bytes: int = Field(description="0 without an SSD tier.")
    ssd_used_bytes: int
    leases: int = Field(description="Requests that are about to read blocks.")
    writers: int = Field(description="Engines that are writing blocks.")
    corrupt_blocks: int = Field(description="Blocks whose checksum failed.")
    models: tuple[KvModelState, ...]
    network: KvNetworkState | None = Field(None, description="None: it is the only store.")
    nodes: dict[str, KvState] = Field(
        default_factory=dict,
        description="Of several nodes: the store of each, of which all else is the sum.",
    )


def together(states: Mapping[str, KvState]) -> KvState:
    """The stores of several nodes as one, by the nodes' names; the only one is that itself."""
    if states.keys() == {""}:
        return states[""]
    models = [model for state in states.values() for model in state.models]
    by_model = {
        name: [each for each in models if each.model == name]
        for name in sorted({each.model for each in models})
    }
    return KvState(
        **_sums(states.values(), KvState.model_fields.keys() - {"models", "network", "nodes"}),
        models=tuple(
            KvModelState(model=name, **_sums(of, KvModelState.model_fields.keys() - {"model"}))
            for name, of in by_model.items()
        ),
        nodes=dict(sorted(states.items())),
    )


def _sums(states: Collection[StateModel], fields: Iterable[str]) -> dict[str, int]:
    return {field: sum(getattr(each, field) for each in states) for field in fields}
