"""Predicting transfers of KV."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.costs.transfer_time import TransferTimes, fit


def test_a_transfer_takes_its_latency_and_its_bytes_time() -> None:
    times = TransferTimes(4e9, 2e9, 1e-3, 2e-3)
    assert times.out.seconds(4_000_000) == pytest.approx(2e-3)
    assert times.into.seconds(4_000_000) == pytest.approx(4e-3)


def test_directions_are_corrected_apart() -> None:
    times = TransferTimes(1e9, 1e9)
    for _ in range(30):
        times.out.observe(10**9, 3.0)
    assert times.out.seconds(10**9) == pytest.approx(3, rel=0.02)
    assert times.into.seconds(10**9) == 1
    assert times.error > 0


def test_the_first_transfer_tells_more_than_a_guess() -> None:
    times = TransferTimes.unprofiled()
    times.into.observe(10**8, 1.0)
    assert times.into.seconds(10**8) == pytest.approx(1)


def test_a_profile_is_not_given_up_for_one_slow_transfer() -> None:
    times = TransferTimes(1e9, 1e9)
    times.out.observe(10**9, 100.0)
    assert times.out.seconds(10**9) < 1.1


@given(st.floats(1e6, 1e12), st.floats(0, 1e-2))
def test_bandwidth_and_latency_are_found_from_transfers(bandwidth: float, latency: float) -> None:
    sizes = [2**power for power in range(10, 28)]
    found = TransferTimes(*[fit([(s, latency + s / bandwidth) for s in sizes])[0]] * 2)
    speed, start = fit([(size, latency + size / bandwidth) for size in sizes])
    assert start + 2**20 / speed == pytest.approx(latency + 2**20 / bandwidth, rel=1e-3)
    assert found.out.seconds(0) == 0


def test_transfers_of_one_size_give_a_bandwidth_alone() -> None:
    speed, latency = fit([(1000, 1.0), (1000, 1.0)])
    assert 1000 / speed + latency == pytest.approx(1)
    assert speed > 0 <= latency
