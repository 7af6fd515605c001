"""What routing comes to behind simulated engines: whole runs, in which each choice has its effect.

Nothing in them depends on the machine, so another run gives the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from loomserve.routers.prefix_index import BLOCK_TOKENS
from tests.routed_fleet import Asked, Device, RoutedFleet, told_over_reported

SMALL = Device(kv_tokens=40_000, running=64)
ENGINES, REQUESTS = 6, 500


def test_loads_that_are_told_at_every_step_are_as_good_as_reports() -> None:
    assert told_over_reported("conversation", 12, 1_500, ["0"]) <= 1.05


def test_without_the_requests_that_wait_they_would_be_worse() -> None:
    ratio = told_over_reported("conversation", 12, 1_500, ["0"], counts_waiting=False)
    assert ratio >= 1.1


def asked(rate: float, group: Callable[[random.Random], int | None]) -> list[Asked]:
    """Prompts that begin as all of their group, or, without one, like no other."""
    rng, at_s, found = random.Random(1), 0.0, []
    for number in range(REQUESTS):
        at_s += rng.expovariate(rate)
        of, blocks = group(rng), 12 + int(rng.expovariate(1 / 12))
        shared = 0 if of is None else 10 + of % 3
        keys = [hash((of, at)) for at in range(shared)]
        keys += [hash((number, at, "own")) for at in range(shared, blocks)]
        output = 1 + int(rng.expovariate(1 / 90))
        found.append(Asked(at_s, blocks * BLOCK_TOKENS, output, tuple(keys)))
    return found


TRACES = {
    "nothing shared": asked(36, lambda rng: None),
    "many beginnings": asked(44, lambda rng: rng.randrange(40)),
    "one that is hot": asked(44, lambda rng: 0 if rng.random() < 0.7 else rng.randrange(40)),
}


@pytest.mark.parametrize("with_store", [False, True], ids=["no store", "store"])
@pytest.mark.parametrize("trace", TRACES)
def test_by_prefixes_is_never_worse_than_by_a_simpler_rule(trace: str, with_store: bool) -> None:
    runs = {
        policy: RoutedFleet(ENGINES, SMALL, policy, with_store=with_store).run(TRACES[trace])
        for policy in ("round_robin", "load_aware", "prefix_aware")
    }
    ours = runs.pop("prefix_aware")
    assert ours.mean <= 1.03 * min(other.mean for other in runs.values())
    assert ours.quantile(0.95) <= 1.08 * min(other.quantile(0.95) for other in runs.values())
    assert ours.computed_tokens <= 1.01 * min(other.computed_tokens for other in runs.values())
    if trace != "nothing shared" and not with_store:
        assert ours.computed_tokens < 0.95 * runs["load_aware"].computed_tokens
