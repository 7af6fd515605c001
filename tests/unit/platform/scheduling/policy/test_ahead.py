"""The share ahead is what a sorted queue has before the request, for any queue."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.scheduling.policy.ahead import share_ahead
from loomserve.platform.scheduling.policy.queue import QUEUES, QueuedRequest

NOW = 100.0


def requests(arrived: st.SearchStrategy[float]) -> st.SearchStrategy[QueuedRequest]:
    return st.builds(
        QueuedRequest,
        arrived_s=arrived,
        tokens=st.integers(1, 1000),
        left=st.integers(1, 1000),
        left_s=st.floats(0, 50),
        deadline_s=st.none() | st.floats(50, 300),
        background=st.booleans(),
    )


EARLIER = st.floats(0, 99)


@given(
    request=requests(st.just(NOW)),
    waiting=st.lists(requests(EARLIER), min_size=1, max_size=20),
    name=st.sampled_from(sorted(QUEUES)),
)
def test_it_is_the_place_in_the_sorted_queue(
    request: QueuedRequest, waiting: list[QueuedRequest], name: str
) -> None:
    priority = QUEUES[name]
    queue = sorted(
        [*waiting, request],
        key=lambda each: (each.background, -priority(each, NOW), each.arrived_s),
    )
    place = next(number for number, each in enumerate(queue) if each is request)
    assert share_ahead(request, waiting, priority, NOW) == place / len(waiting)


@given(st.lists(requests(EARLIER).map(lambda each: each._replace(background=False)), min_size=1))
def test_first_come_first_served_lets_it_wait_for_all(waiting: list[QueuedRequest]) -> None:
    asked = QueuedRequest(arrived_s=NOW, tokens=1, left=1, deadline_s=NOW + 1)
    assert share_ahead(asked, waiting, QUEUES["fcfs"], NOW) == 1.0


@pytest.mark.parametrize("name", sorted(QUEUES))
def test_where_nothing_is_known_all_are_taken_to_be_ahead(name: str) -> None:
    asked = QueuedRequest(arrived_s=NOW, tokens=1, left=1, deadline_s=NOW + 1)
    assert share_ahead(asked, [], QUEUES[name], NOW) == 1.0
