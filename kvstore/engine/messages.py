"""What the connector's two halves tell each other around a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from loomserve.kvstore.engine.transfers.copies import Load, Save


@dataclass
class StepTransfers(KVConnectorMetadata):  # type: ignore[misc]
    """Copies that the workers make around one step; each load and save is given by rank.

    ``swap_outs`` are saved before the step, which may overwrite their blocks; ``fetches``, by
    request, are loaded beside this step and later ones.
    """

    loads: list[dict[int, Load]] = field(default_factory=list)
    saves: list[dict[int, Save]] = field(default_factory=list)
    swap_outs: list[dict[int, Save]] = field(default_factory=list)
    fetches: dict[str, dict[int, Load]] = field(default_factory=dict)


@dataclass
class Transferred(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Bytes that a worker copied since its last report, and the seconds that took.

    ``out_blocks`` are the blocks that were saved, or its parts of them, and ``out_core_s`` the
    seconds of a core that this took in all.
    """

    out_bytes: int
    out_s: float
    in_bytes: int
    in_s: float
    out_blocks: int
    out_core_s: float

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Transferred:
        """Sum the bytes of two workers; they copy at the same time, so the longer time counts."""
        assert isinstance(other, Transferred)
        return Transferred(
            self.out_bytes + other.out_bytes,
            max(self.out_s, other.out_s),
            self.in_bytes + other.in_bytes,
            max(self.in_s, other.in_s),
            max(self.out_blocks, other.out_blocks),
            max(self.out_core_s, other.out_core_s),
        )
