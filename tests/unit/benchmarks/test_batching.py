"""The arguments of the benchmark of static batches."""

from __future__ import annotations

import pytest

from benchmarks.batching import REAL_ARMS, Real, arguments, candidates, real_ratios
from loomserve.routers.static_batching.base import KvBudget


@pytest.mark.parametrize(
    ("words", "slo_load"),
    [
        ("", 1.0),
        ("--loads 1.5", 1.5),
        ("--loads 3 2", 2.0),
        ("--loads 1.5 2 --slo-load 2", 2.0),
    ],
)
def test_deadlines_are_told_of_the_least_load_unless_another_is_named(
    words: str, slo_load: float
) -> None:
    options = arguments(words.split())
    assert options.slo_load == slo_load
    assert options.slo_load in options.loads


def test_deadlines_cannot_be_told_of_a_load_that_is_not_measured() -> None:
    with pytest.raises(SystemExit):
        arguments(["--loads", "1.5", "--slo-load", "1"])


def test_a_real_run_has_each_policy_that_the_model_has() -> None:
    known = {*candidates(KvBudget(2**20, 1)), "vllm"}
    assert {*REAL_ARMS} <= known
    assert {"vanilla", "vllm", "s3_hrrn", "wma_hrrn", "slo_odbs", "slo_odbs_sum"} <= {*REAL_ARMS}
    assert arguments([]).real_requests * arguments([]).real_runs >= 100


def test_real_ratios_are_of_the_same_run() -> None:
    def real(vanilla: float, others: float) -> Real:
        def figures(value: float) -> dict[str, dict[str, float]]:
            names = ("throughput", "mean_response_s", "p95_response_s")
            return {"real": dict.fromkeys(names, value)}

        of = {arm: figures(vanilla if arm == "vanilla" else others) for arm in REAL_ARMS}
        return Real(of, 0.0, 1)

    found = real_ratios([real(1.0, 2.0), real(4.0, 4.0), real(1.0, 3.0)])
    assert found["s3_hrrn"]["throughput"]["all"] == (2.0, 1.0, 3.0)
    assert found["s3_hrrn"]["throughput"]["median"] == 2.0
    assert "vanilla" not in found
