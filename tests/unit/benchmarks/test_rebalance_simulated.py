from __future__ import annotations

from benchmarks.popularity import NORTH, SOUTH, Asked, Phase, load
from benchmarks.rebalance_replicas import oscillations
from benchmarks.rebalance_simulated import MEMORY, STEP_S, WEIGHTS, idle, simulated
from benchmarks.workload import azure_like

TRACE = [
    each for each in azure_like("conversation", requests=12_000, seed="t") if each.output_tokens > 1
]


def burst(rate: float, seconds: float) -> list[Asked]:
    return load(TRACE, [Phase(seconds, {NORTH: rate, SOUTH: 0.1})], "burst")


def test_every_request_gets_all_of_its_tokens_one_after_the_other() -> None:
    all_ = burst(20.0, 20.0)
    for arm in ("static", "auto", "unified"):
        answers = simulated(arm, all_, [(0.0, 20.0)], 20.0).answers
        assert len(answers) == len(all_)
        for one in answers:
            assert len(one.times) == len(one.tokens) == one.asked.request.output_tokens
            assert one.times == sorted(set(one.times))
            assert one.ttft_s > 0


def test_a_request_alone_takes_a_step_a_token() -> None:
    step_s = STEP_S + WEIGHTS / MEMORY
    assert step_s <= idle(TRACE).tpot_s / 5 <= 1.3 * step_s


def test_the_controller_starts_one_replica_of_a_swamped_model_and_gains() -> None:
    all_, counted = burst(32.0, 240.0), [(0.0, 240.0)]
    static, auto = (simulated(arm, all_, counted, 240.0) for arm in ("static", "auto"))
    added = [each for each in auto.moves if each["action"]["action"] == "add_replica"]
    assert [each["action"]["model"] for each in added] == [NORTH]
    assert auto.throughput > 1.1 * static.throughput


def test_two_models_that_are_as_cold_move_nothing() -> None:
    assert not simulated("auto", burst(0.1, 600.0), [(0.0, 600.0)], 600.0).moves


def test_a_replica_that_comes_and_goes_in_one_phase_is_an_oscillation_of_its_model() -> None:
    def move(at_s: float, action: str, model: str) -> dict[str, object]:
        return {"at_s": at_s, "action": {"action": action, "model": model}}

    come, gone = move(5.0, "add_replica", NORTH), move(8.0, "remove_replica", NORTH)
    assert oscillations([come, gone], [10.0, 20.0]) == 1
    assert oscillations([come, move(12.0, "remove_replica", NORTH)], [10.0, 20.0]) == 0
    assert oscillations([come, move(8.0, "remove_replica", SOUTH)], [10.0, 20.0]) == 0
