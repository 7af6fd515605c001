"""The admin API's part for usage."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query

from loomserve.platform.base.errors import BadRequest, Unavailable
from loomserve.platform.usage.files import minute_of
from loomserve.platform.usage.meter import UsageMeter
from loomserve.platform.usage.report import UsageReport, groups_of, summed

_FROM = "Begin of the span, a date or a time, to the minute; UTC, if it names no other zone. "
_TO = "End of the span, which is not in it. "


def build_usage_router(meter: UsageMeter) -> APIRouter:
    """The route ``/usage``."""
    router = APIRouter(prefix="/usage", tags=["usage"])

    @router.get("", response_model=UsageReport, response_model_exclude_none=True)
    async def usage(
        begin: Annotated[
            datetime | None, Query(alias="from", description=_FROM + "Left out: this month's.")
        ] = None,
        end: Annotated[
            datetime | None, Query(alias="to", description=_TO + "Left out: now.")
        ] = None,
        by: Annotated[
            str, Query(description="What sums are told apart by: key, model, day, month.")
        ] = "key,model",
    ) -> UsageReport:
        """Tokens and device seconds of requests that ended in a span of time.

        What other gateways counted within the last `server.usage.interval_s` may be missing.
        """
        groups = groups_of(by)
        now = datetime.now(UTC)
        first = _utc(begin) or now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
        # The minute that runs is in it.
        last = _utc(end) or now + timedelta(minutes=1)
        if last <= first:
            raise BadRequest("to is not later than from, so there is nothing between", param="to")
        span = minute_of(first.timestamp()), minute_of(last.timestamp())
        try:
            sums = await asyncio.to_thread(lambda: summed(meter.read(*span), groups))
        except OSError as error:
            raise Unavailable(f"the files of usage cannot be read: {error}") from None
        return UsageReport(begin=first, end=last, by=groups, usage=sums)

    return router


def _utc(given: datetime | None) -> datetime | None:
    if given is None:
        return None
    return given.replace(tzinfo=UTC) if given.tzinfo is None else given.astimezone(UTC)
