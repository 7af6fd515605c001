from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.front_end.policy.send_times import SendTimes


def test_a_load_holds_what_was_sent_until_the_last_request_that_it_counts() -> None:
    times = SendTimes()
    assert times.counted(0, 1.0) == 1.0
    for at in (2.0, 3.0, 4.0):
        times.sent(at)
    assert 1.9 < times.counted(0, 5.0) < 2.0
    assert 3.9 < times.counted(2, 5.0) < 4.0
    # A load that was overtaken counts no less.
    assert 3.9 < times.counted(1, 5.5) < 4.0
    assert times.counted(3, 6.0) == 6.0


def test_a_request_after_a_long_pause_does_not_make_the_load_an_old_one() -> None:
    times = SendTimes()
    times.sent(1.0)
    times.counted(1, 1.1)
    times.sent(100.0)
    assert 99.9 < times.counted(1, 100.1) < 100.0
    # Requests that are sent at once are told apart all the same.
    times.sent(100.001)
    assert times.counted(2, 100.2) == 100.0


@given(st.lists(st.one_of(st.none(), st.integers(0, 5)), max_size=60))
def test_exactly_what_is_counted_was_sent_until_then(events: list[int | None]) -> None:
    """None sends one; a number is how many of those on the way the engine counts."""
    times, sent, counted, now = SendTimes(), list[float](), 0, 0.0
    for event in events:
        now += 1
        if event is None:
            sent.append(now)
            times.sent(now)
            continue
        counted = min(len(sent), counted + event)
        until = times.counted(counted, now)
        assert [at for at in sent if at <= until] == sent[:counted]
