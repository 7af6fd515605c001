"""Both ends of a replica's loans."""

from __future__ import annotations

import contextlib
import logging
import time

from prometheus_client import CollectorRegistry
from starlette.routing import Route

from loomserve.platform.base.periodic import every
from loomserve.platform.fleet.messages import DesiredState, EngineSpec
from loomserve.platform.lending.messages import EngineRpc
from loomserve.platform.lending.metrics import LendingMetrics
from loomserve.platform.lending.replica.endpoint import LoanEndpoint
from loomserve.platform.lending.replica.reconciler import LoanReconciler
from loomserve.platform.state import BorrowingState, LentState

_log = logging.getLogger("ray.serve")

_PERIOD_S = 1.0


class LoanAgent:
    """Borrows and lends for one replica, as its spec allows: either, both or neither."""

    def __init__(
        self, rpc: EngineRpc, spec: EngineSpec, replica_id: str, registry: CollectorRegistry
    ) -> None:
        self._reconciler: LoanReconciler | None = None
        self._endpoint: LoanEndpoint | None = None
        model, lending = spec.model.name, spec.lending
        # Most models that find their pairs by themselves have none.
        metrics = LendingMetrics(registry)
        quiet = spec.model.lending is not None and spec.model.lending.auto
        if lending is not None and lending.borrow_bytes:
            self._reconciler = LoanReconciler(
                rpc,
                metrics,
                model=model,
                replica_id=replica_id,
                most=lending.lenders,
                internal_token=spec.internal_token,
                drain_timeout_s=spec.server.drain_timeout_s,
                quiet=quiet,
            )
        if lending is not None and lending.lend_bytes:
            self._endpoint = LoanEndpoint(
                rpc, metrics, model=model, replica_id=replica_id, quiet=quiet
            )

    @property
    def routes(self) -> list[Route]:
        return self._endpoint.routes if self._endpoint else []

    @property
    def borrowing(self) -> BorrowingState | None:
        """None: it borrows nothing, or has not looked yet."""
        return self._reconciler.state if self._reconciler else None

    @property
    def lent(self) -> tuple[LentState, ...]:
        return self._endpoint.lent if self._endpoint else ()

    def apply(self, desired: DesiredState) -> None:
        for end in (self._reconciler, self._endpoint):
            if end is not None:
                end.apply(desired)

    async def run(self) -> None:
        if self._reconciler or self._endpoint:
            # Serve looks after an engine that is dead; all else is tried again.
            await every(_PERIOD_S, self._reconcile, failed=_warn)

    async def _reconcile(self) -> None:
        if self._reconciler:
            await self._reconciler.reconcile(time.monotonic())
        if self._endpoint:
            await self._endpoint.reconcile()

    async def take_back(self) -> None:
        if self._endpoint:
            with contextlib.suppress(Exception):  # the engine may be dead
                await self._endpoint.close()

    async def give_back(self) -> None:
        """End all that is borrowed, once no request runs."""
        if self._reconciler:
            await self._reconciler.close()


def _warn(error: Exception) -> None:
    _log.warning("loans could not be looked after: %r", error)
