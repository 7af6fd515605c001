from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loomserve.platform.access.rates import burst
from loomserve.platform.access.request_meter import RequestMeter
from loomserve.platform.base.errors import BadRequest, TooManyRequests
from loomserve.platform.config import ApiKey

# Small rates have small bursts, which short sequences of requests exceed.
RATES = st.integers(1, 60) | st.integers(1, 6000)
GAPS_S = st.lists(st.just(0.0) | st.floats(0, 1) | st.floats(0, 600), max_size=100)
# A deadline would measure how busy the machine is.
untimed = settings(deadline=None)


def _key(requests_per_minute: int | None = None, max_concurrent: int | None = None) -> ApiKey:
    return ApiKey(
        name="user",
        hash="sha256:" + "0" * 64,
        requests_per_minute=requests_per_minute,
        max_concurrent=max_concurrent,
    )


class Meter:
    """The requests of one key on a clock that is set."""

    def __init__(self, key: ApiKey) -> None:
        self._key, self._now_s = key, 0.0
        self._meter = RequestMeter(clock=lambda: self._now_s)
        self.running = 0

    def acquire(self, now_s: float = 0.0) -> None:
        self._now_s = now_s
        self._meter.acquire(self._key)
        self.running += 1

    def acquire_more(self, more: int) -> None:
        self._meter.acquire_more(self._key, more)
        self.running += more

    def release(self, sequences: int = 1) -> None:
        self._meter.release(self._key, sequences)
        self.running -= sequences


def _admitted_times(key: ApiKey, times_s: list[float]) -> list[float]:
    meter, admitted = Meter(key), []
    for now_s in times_s:
        try:
            meter.acquire(now_s)
        except TooManyRequests:
            continue
        admitted.append(now_s)
    return admitted


@pytest.mark.parametrize(
    ("requests_per_minute", "at_once"), [(1, 1), (6, 1), (7, 2), (60, 10), (600, 100)]
)
def test_a_quiet_key_may_send_ten_seconds_worth_at_once(
    requests_per_minute: int, at_once: int
) -> None:
    assert burst(requests_per_minute) == at_once
    admitted = _admitted_times(_key(requests_per_minute), [100.0] * (at_once + 5))
    assert len(admitted) == at_once


def test_a_long_silence_saves_up_no_more_than_the_burst() -> None:
    times_s = [0.0] + [3600.0] * 20
    assert _admitted_times(_key(60), times_s) == [0.0] + [3600.0] * 10


@untimed
@given(RATES, GAPS_S, st.floats(0, 1e9))
def test_no_span_of_time_admits_more_than_the_burst_and_the_rate(
    requests_per_minute: int, gaps_s: list[float], start_s: float
) -> None:
    times_s = [start_s]
    for gap_s in gaps_s:
        times_s.append(times_s[-1] + gap_s)
    admitted = _admitted_times(_key(requests_per_minute), times_s)
    for i, first_s in enumerate(admitted):
        for j in range(i, len(admitted)):
            allowed = burst(requests_per_minute) + requests_per_minute / 60 * (
                admitted[j] - first_s
            )
            # Half of the last bit of a clock near 1e9 s is 6e-8 s, at either end of the span.
            assert j - i + 1 <= allowed + 2e-7 * requests_per_minute / 60 + 1e-6


@untimed
@given(RATES, st.integers(1, 50))
def test_a_client_that_keeps_to_the_rate_is_never_refused(
    requests_per_minute: int, requests: int
) -> None:
    times_s = [i * (60 / requests_per_minute) * (1 + 1e-9) for i in range(requests)]
    assert _admitted_times(_key(requests_per_minute), times_s) == times_s


@untimed
@given(RATES, st.floats(0, 1e6), st.floats(0, 0.999))
def test_retry_after_is_exact(requests_per_minute: int, now_s: float, early: float) -> None:
    meter = Meter(_key(requests_per_minute))
    for _ in range(burst(requests_per_minute)):
        meter.acquire(now_s)
    with pytest.raises(TooManyRequests) as refusal:
        meter.acquire(now_s)
    wait_s = refusal.value.retry_after_s
    assert wait_s is not None
    assert wait_s == pytest.approx(60 / requests_per_minute, rel=1e-3, abs=1e-6)
    with pytest.raises(TooManyRequests):
        meter.acquire(now_s + wait_s * early - 1e-6)
    meter.acquire(now_s + wait_s + 1e-6)


def test_a_refusal_costs_nothing() -> None:
    meter = Meter(_key(6))
    meter.acquire()
    for tenth in range(99):
        with pytest.raises(TooManyRequests):
            meter.acquire(tenth / 10)
    meter.acquire(10.0)


def test_being_over_the_concurrency_spends_no_rate() -> None:
    meter = Meter(_key(requests_per_minute=1, max_concurrent=1))
    meter.acquire()
    with pytest.raises(TooManyRequests) as refusal:
        meter.acquire(100.0)
    assert refusal.value.code == "concurrency_limit_exceeded"
    assert refusal.value.retry_after_s is not None
    meter.release()
    meter.acquire(100.0)


@untimed
@given(
    st.integers(1, 8),
    st.none() | st.integers(1, 600),
    st.lists(st.tuples(st.booleans(), st.floats(0, 5)), max_size=100),
)
def test_running_requests_stay_between_none_and_the_limit_and_release_restores(
    max_concurrent: int, requests_per_minute: int | None, steps: list[tuple[bool, float]]
) -> None:
    meter, now_s = Meter(_key(requests_per_minute, max_concurrent)), 0.0
    for asks, gap_s in steps:
        now_s += gap_s
        if asks:
            with suppress(TooManyRequests):
                meter.acquire(now_s)
        elif meter.running:
            meter.release()
        assert 0 <= meter.running <= max_concurrent
    for _ in range(meter.running):
        meter.release()
    for _ in range(max_concurrent):
        now_s += 60
        meter.acquire(now_s)


def test_a_release_without_a_request_is_an_error() -> None:
    with pytest.raises(ValueError, match="without a running request"):
        Meter(_key()).release()


def test_a_key_without_limits_is_never_refused() -> None:
    assert len(_admitted_times(_key(), [0.0] * 1000)) == 1000


def test_a_clock_that_steps_back_admits_no_more() -> None:
    meter = Meter(_key(6))
    meter.acquire(100.0)
    with pytest.raises(TooManyRequests):
        meter.acquire(50.0)


def test_a_request_counts_as_its_sequences_once_it_was_read() -> None:
    meter = Meter(_key(max_concurrent=8))
    meter.acquire()
    meter.acquire_more(4)
    meter.acquire()
    with pytest.raises(TooManyRequests):
        meter.acquire_more(3)
    meter.acquire_more(2)
    with pytest.raises(TooManyRequests):
        meter.acquire()
    meter.release(5)
    meter.release(3)
    with pytest.raises(ValueError, match="release"):
        meter.release()


def test_more_sequences_than_a_key_may_ever_have_are_no_matter_of_time() -> None:
    meter = Meter(_key(max_concurrent=8))
    meter.acquire()
    with pytest.raises(BadRequest, match="Ask for fewer"):
        meter.acquire_more(8)
    unlimited = Meter(_key())
    unlimited.acquire()
    unlimited.acquire_more(1000)
