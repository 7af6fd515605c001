"""Which requests leave an engine."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.scheduling.policy.preemption import StayingRequest, leaving


def test_who_waits_leaves_first_the_newest_first_then_who_has_the_fewest_tokens() -> None:
    requests = [
        StayingRequest("long", 900, False, 1.0),
        StayingRequest("short", 30, False, 0.0),
        StayingRequest("waits", 500, True, 2.0),
        StayingRequest("waits newly", 700, True, 3.0),
        StayingRequest("medium", 200, False, 4.0),
    ]
    assert leaving(requests, 4) == ["waits newly", "waits", "short", "medium"]


REQUESTS = st.lists(
    st.builds(
        StayingRequest,
        id=st.uuids().map(str),
        tokens=st.integers(0, 5),
        waits=st.booleans(),
        arrived_at=st.floats(0, 5),
    ),
    unique_by=lambda each: each.id,
)


@given(REQUESTS, st.integers(-1, 12), st.randoms(use_true_random=False))
def test_never_more_than_there_are_or_are_asked_for_in_whatever_order_they_stand(
    requests: list[StayingRequest], most: int, random: object
) -> None:
    chosen = leaving(requests, most)
    assert len(chosen) == len(set(chosen)) == min(max(most, 0), len(requests))
    random.shuffle(requests)  # type: ignore[attr-defined]
    assert leaving(requests, most) == chosen
    left = [each for each in requests if each.id in chosen]
    stay = [each for each in requests if each.id not in chosen]
    if any(each.waits for each in stay):
        assert all(each.waits for each in left)
    running = [each.tokens for each in left if not each.waits]
    if running:
        assert max(running) <= min((each.tokens for each in stay if not each.waits), default=9)
