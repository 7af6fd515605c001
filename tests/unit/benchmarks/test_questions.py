"""What single questions compute of their runs."""

from __future__ import annotations

import argparse
import itertools

import pytest

from benchmarks import deadlines, disaggregation, overhead, rebalance
from benchmarks.load import Outcome, Request


def test_ratios_of_pairs_are_told_by_load() -> None:
    def window(throughput: float, ttft: float) -> dict[str, float]:
        return {"tokens_per_second": throughput, "ttft_ms_p50": ttft, "requests": 3}

    pairs = [(window(100, 30), window(90, 35)), (window(50, 60), window(50, 62)),
             (window(200, 15), window(190, 19))]  # fmt: skip
    found = overhead.comparison({"first": pairs, "8": pairs})
    assert found["throughput_ratio_8"] == pytest.approx(0.95)
    assert found["spread"]["throughput_ratio_8"] == pytest.approx([0.9, 1.0])
    assert found["ttft_added_ms_p50"] == pytest.approx(4.0)
    assert found["runs"] == 3
    assert overhead.absolute([base for base, _ in pairs])["requests"] == 9


def test_loads_and_arms_are_chosen_each_once() -> None:
    assert overhead.arguments(["--loads", "8,first"]).loads == ("8", "first")
    for wrong in ("9", "8,8", ""):
        with pytest.raises(SystemExit):
            overhead.arguments(["--loads", wrong])
    for wrong in ("bare", "bare,other", "bare,loomserve:/nowhere"):
        with pytest.raises(argparse.ArgumentTypeError):
            overhead.parse_kinds(wrong)


def test_the_baseline_goes_with_each_other_and_itself_first() -> None:
    options = overhead.arguments([])
    names = [overhead.comparison_name(*kinds) for kinds in overhead.pairs(options.arms)]
    assert names == ["noise", "one", "loomserve", "default"]
    assert overhead.comparison_name("loomserve:/x", "loomserve") == "loomserve"
    assert overhead.comparison_name("bare", "loomserve:/x") == "loomserve-there"


def answered(prompt: int, ttft_ms: float, *gaps_ms: float) -> Outcome:
    times = tuple(at / 1000 for at in itertools.accumulate([ttft_ms, *gaps_ms]))
    return Outcome(0.0, prompt_tokens=prompt, output_tokens=len(times), times=times)


def test_the_slo_is_a_multiple_of_the_idle_server_for_that_length_of_prompt() -> None:
    idle = [answered(100, 10, 4, 4), answered(300, 30, 2, 2), answered(300, 50, 6, 6)]
    slo = disaggregation.Slo.over(idle, ttft_times=5, tpot_times=3)
    assert slo.lengths == (100, 300)
    assert (*slo.ttft_s, slo.tpot_s) == pytest.approx((0.05, 0.2, 0.012))
    assert slo.met(answered(200, 124, 12, 11))
    assert not slo.met(answered(200, 126, 12, 11))
    assert not slo.met(answered(200, 124, 12, 13))
    assert not slo.met(answered(10, 51, 1))


def test_the_hand_off_is_what_the_second_token_waits_beyond_a_later_one() -> None:
    lengths = disaggregation.PROBE_LENGTHS
    rounds = [
        [answered(length, 9, 30 + n + place, 10, 10) for place, length in enumerate(lengths)]
        for n in range(3)
    ]
    found = disaggregation.handoffs(list(itertools.chain(*rounds)))
    assert found["handoff_ms"]["median"] == pytest.approx(22)
    assert found["handoff_ms_by_prompt"]["64"] == pytest.approx(21)
    probes = disaggregation.probes()
    assert tuple(one.tokens for one in probes) == lengths * disaggregation.PROBES
    assert len({one.blocks[0] for one in probes}) == len(probes)


def test_goodput_has_a_ratio_even_where_the_unified_arm_meets_no_slo() -> None:
    slo = disaggregation.Slo((100,), (1.0,), 0.1)
    late, early = ([answered(100, ttft, 5)] * 4 for ttft in (1e4, 1))
    figures = {"separated": early, "unified": late}
    run = {name: disaggregation.figures(of, slo) for name, of in figures.items()}
    assert disaggregation.comparison([run], 4)["goodput_ratio"] == 4


def test_an_action_that_undoes_one_of_its_phase_is_an_oscillation() -> None:
    def move(at_s: float, back: bool) -> dict[str, object]:
        return {"at_s": at_s, "action": "move", "kind": "heads", "engine": "a", "lender": "b",
                "back": back}  # fmt: skip

    replicas = [
        {"at_s": at_s, "action": action, "model": "m"}
        for at_s, action in ((1.0, "add_replica"), (2.0, "remove_replica"), (9.0, "add_replica"))
    ]
    assert rebalance.oscillations([move(1, False), move(2, True)], [5, 10]) == 1
    assert rebalance.oscillations([move(1, False), move(6, True)], [5, 10]) == 0
    assert rebalance.oscillations(replicas, [5, 10]) == 1


def test_a_request_that_is_refused_has_missed_its_deadline() -> None:
    asked = [Request.chat("m", [], 1, at_s=float(at), slo_s=2.0) for at in range(3)]
    outcomes = [Outcome(0, last=1.5), Outcome(1, error="HTTP 429: deadline_unreachable"),
                Outcome(2, last=5.0)]  # fmt: skip
    found = deadlines.figures(asked, outcomes)
    assert (found["attainment"], found["refused"]) == (pytest.approx(1 / 3), 1)
    assert found["goodput"] == pytest.approx(1 / 5)


def test_deadlines_are_drawn_evenly_up_to_the_longest() -> None:
    coming = deadlines.comes(200, None, 2.0, 70.0, "a")
    assert coming == deadlines.comes(200, None, 2.0, 70.0, "a")
    within = [within_s for _, within_s in coming]
    assert 0 < min(within) < 5 < 60 < max(within) <= 70
    assert coming[-1][0] == pytest.approx(199 / 2.0)
