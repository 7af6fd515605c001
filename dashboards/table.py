"""All dashboards, in the order in which an operator comes to need them."""

from __future__ import annotations

from dashboards import (
    batch,
    devices,
    kvstore,
    lending,
    model,
    overview,
    rebalancing,
    scheduling,
    tenants,
)

DASHBOARDS = tuple(
    page.DASHBOARD
    for page in (
        overview,
        model,
        devices,
        kvstore,
        batch,
        tenants,
        scheduling,
        lending,
        rebalancing,
    )
)
