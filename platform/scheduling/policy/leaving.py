"""Which requests leave an engine, where some of them are to go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StayingRequest:
    """A request of an engine that could go on elsewhere."""

    id: str
    tokens: int
    """Of its prompt and its answer, whose KV it needs where it goes on."""
    waits: bool
    """Whether it waits to be run, so that it loses nothing here."""
    arrived_at: float


def leaving(requests: Iterable[StayingRequest], most: int) -> list[str]:
    """Ids of at most so many requests, those first that lose least.

    That is who waits, the newest first, for it is served last here; then who runs with the fewest
    tokens to be loaded or computed again.
    """
    ordered = sorted(
        requests,
        key=lambda each: (
            not each.waits,
            -each.arrived_at if each.waits else each.tokens,
            each.tokens,
            each.id,
        ),
    )
    return [each.id for each in ordered[: max(most, 0)]]
