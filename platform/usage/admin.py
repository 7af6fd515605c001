"""The admin API's part for usage, and its sums."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from loomserve.platform.base.errors import BadRequest, Unavailable
from loomserve.platform.usage.files import UsageRecord, minute_of
from loomserve.platform.usage.meter import UsageMeter

_VALUES: dict[str, Callable[[UsageRecord], str]] = {
    "key": lambda record: record.key,
    "model": lambda record: record.model,
    "day": lambda record: record.minute[:10],
    "month": lambda record: record.month,
}
"""By what sums can be told apart."""


class UsageSum(BaseModel):
    """What some requests used in all; by what they are not told apart is missing."""

    model_config = ConfigDict(frozen=True)

    key: str | None = Field(None, description="The API key's name; empty: without a key.")
    model: str | None = None
    day: str | None = Field(None, description="Of UTC, such as 2026-11-26.")
    month: str | None = None
    requests: int = Field(description="Requests for which an engine gave at least one token.")
    prompt_tokens: int
    cached_tokens: int = Field(
        description="Tokens of prompts that the prefix cache or the KV store had."
    )
    completion_tokens: int
    device_seconds: float = Field(
        description="The requests' shares of the time of engines' steps, by computed tokens."
    )


class UsageReport(BaseModel):
    """Usage of a span of time."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    begin: datetime = Field(alias="from")
    end: datetime = Field(alias="to")
    by: tuple[str, ...]
    usage: tuple[UsageSum, ...] = Field(description="The ones with the most device seconds first.")


def groups_of(by: str) -> tuple[str, ...]:
    """What a query such as ``key,model`` asks for; BadRequest: it names something else."""
    named = tuple(dict.fromkeys(word.strip() for word in by.split(",") if word.strip()))
    for word in named:
        if word not in _VALUES:
            raise BadRequest(
                f"usage is not told apart by {word!r}; by may name {', '.join(_VALUES)}", param="by"
            )
    return named


def summed(records: Iterable[UsageRecord], by: Sequence[str]) -> tuple[UsageSum, ...]:
    """Sums of records that agree in all of ``by``, which :func:`groups_of` has checked."""
    sums: dict[tuple[str, ...], UsageRecord] = {}
    for record in records:
        place = tuple(_VALUES[group](record) for group in by)
        known = sums.setdefault(place, UsageRecord(record.minute, record.key, record.model))
        known.add(record)
    shown = [
        UsageSum.model_validate({**dict(zip(by, place, strict=True)), **each.amounts})
        for place, each in sums.items()
    ]
    return tuple(sorted(shown, key=lambda each: -each.device_seconds))


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
