"""A worker's end of the loans in which it is the lender."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from loomserve.platform.base.heap import give_back_freed
from loomserve.platform.lending.engine.attention import LendingContext
from loomserve.platform.lending.engine.hosted_layers import HostedLayers
from loomserve.platform.lending.engine.memory.lent import borrower_caches
from loomserve.platform.lending.engine.shards.shard import LocalKv
from loomserve.platform.lending.engine.sliced_operators import SlicedOperators
from loomserve.platform.lending.leaf import LenderEnd
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
