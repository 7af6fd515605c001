"""Tables of arms take what the benchmarks' own figures are, with n beside percentiles."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pytest

from benchmarks import (
    adaptive,
    deadlines,
    documents,
    lent_share,
    prefix,
    rebalance,
    store,
    tables,
    tables_of_arms,
    weave,
)
from benchmarks.adaptive_engine import Served as AdaptiveServed
from benchmarks.adaptive_engine import Setting
from benchmarks.popularity import Answer, Asked
from benchmarks.report import Sample, absolute, comparison
from benchmarks.result_files import CITED, Result
from benchmarks.slo import Job, Timed
from benchmarks.weave_engines import Served
from benchmarks.weave_memory import Division
from benchmarks.workload import PrefixRequest
from loomserve.platform.scheduling.policy.expected import Expected

ASKED = PrefixRequest(at_s=0.0, blocks=(0,), tokens=8, output_tokens=2)


def kept(figures: Mapping[str, Any], **setup: Any) -> Result:
    """As a file has it."""
    return Result(json.loads(json.dumps({**figures, "setup": setup})))


def test_each_arm_stands_beside_the_noise() -> None:
    def of(ratio: float) -> dict[str, Any]:
        base, arm = (
            Sample(speed, (30.0, 40.0), (20.0, 30.0), 70.0, 1.0) for speed in (100.0, 100 * ratio)
        )
        pairs = {load: [(base, arm)] for load in ("first", "8", "32")}
        own = {load: absolute([base]) for load in pairs}
        rest = {"absolute": {"bare": own}, "memory_gib": 4.13, "idle_cores": 0.12}
        return {**comparison(pairs), **rest}

    result = kept({"comparisons": {"noise": of(1.0), "default": of(0.95)}})
    assert "|  | noise |\n" in tables_of_arms.overhead_of_models(result)
    text = tables_of_arms.overhead(result)
    assert "|  | noise | default |" in text
    assert "| output tokens/s, 8 streams (n = 2) | 1.00 | 0.950 |" in text
    assert "median first token, later by (n = 2)" in text


def runs_of(share: float = 1.0) -> list[weave.Run]:
    hot = Served(200, 2.0, [10.0 * share] * 3, [50.0])
    return [weave.Run(hot, Served(20, 2.0, [20.0, 30.0], [9.0, 9.0]), {})]


def woven() -> dict[str, Any]:
    runs = {arm: {6.0: runs_of()} for arm in ("stock", "dedicated", "slices")}
    return {
        **weave.compared(runs, "slices"),
        "by_tpot_budget": {"1.05": weave.compared(runs, "slices")},
        "blocks": asdict(Division(16, 80, 48)),
        "by_arm": {
            arm: {str(rate): weave.figures(of) for rate, of in by_rate.items()}
            for arm, by_rate in runs.items()
        },
        "runs": 1,
    }


def test_weaving_is_told_with_how_many_cold_requests() -> None:
    text = tables_of_arms.weave(kept(woven()))
    assert "Of 144 blocks the hot model has 16, and 80 of the cold one's" in text
    assert "| stock | 6.0 | 100 | 10 ms (n = 3) | 0 | 25 ms | 30 ms (n = 2) |" in text
    assert "| its p99 (n = 2 a run and arm) | 1.00 |" in text


def test_the_curve_has_a_row_a_ratio() -> None:
    curve = {"by_lent_over_own": {"0.5": woven(), "5.0": woven()}, "runs": 1}
    text = tables_of_arms.weave_curve(kept(curve))
    assert "| 0.5 | 16 and 80 | 1.00 | 1.00 | 1.00 | 1.00; n = 2 a run |" in text
    assert "| 5 |" in text


def test_each_budget_of_the_lender_has_a_row() -> None:
    text = tables_of_arms.weave_budgets(kept(woven()))
    assert "| as it comes | 1.00 | 1.00 | 1.00 |" in text
    assert "| 1.05 | 1.00 | 1.00 | 1.00 | 1.00; n = 2 a run |" in text


def test_the_share_to_lend_has_a_row_a_point() -> None:
    runs = [{share: runs_of(1 + share)[0] for share in lent_share.SHARES}]
    data = {
        "hot_tpot": {str(each): lent_share.ratios(runs, each, "hot") for each in runs[0]},
        "cold_tpot": {str(each): lent_share.ratios(runs, each, "cold") for each in runs[0]},
        "by_share": {str(each): lent_share.absolute(runs, each) for each in runs[0]},
        "runs": 1,
    }
    assert "| 50 % | 1.50 | 1.00 | 2 |" in tables_of_arms.lent_share(kept(data))


def test_documents_are_told_by_round_and_over_each_other_arm() -> None:
    def rounds(again_ms: float) -> dict[str, documents.Round]:
        first = documents.Round([1000.0, 3000.0], 100, 0, 2.0)
        again = documents.Round([again_ms, again_ms], 100, 90, 1.0)
        return {
            "first": first,
            "again": again,
            "all": documents.together([first, again]),
            "after_restart": again,
        }

    run = {"store_and_disk": rounds(200.0), "no_store": rounds(800.0)}
    text = tables_of_arms.documents(kept(documents.report([run])))
    assert "| `store_and_disk` | 0.60 s, 0.45 | 2.0 s, 0 | 0.20 s, 0.90 | 0.20 s, 0.90 |" in text
    assert "| `store_and_disk` over | `no_store` |" in text
    assert "| median TTFT, all rounds (n = 4 a run and arm) | 0.67 |" in text
    assert "| median TTFT, the rounds after it (n = 2 a run and arm) | 0.25 |" in text
    assert "| time, after a restart of all engines (n = 2 a run and arm) | 1.0 |" in text


def test_pairs_of_prefixes_have_both_hit_rates() -> None:
    pair = prefix.Replay([100.0, 200.0], 0.4, 0.1), prefix.Replay([200.0, 400.0], 0.2, 0.1)
    text = tables_of_arms.prefix(
        kept({**prefix.report({("store", "no_store"): [pair]}), "runs": 1})
    )
    assert "| store over no store | 0.50 | 0.50; n = 2 a run | 0.40, 0.20 |" in text


def answered(first_s: float) -> Answer:
    """Two tokens of a request that was due at 10 s."""
    return Answer(Asked("north", 10.0, ASKED), 10.0, [first_s, first_s + 0.2], [1, 2])


def test_moves_are_told_an_arm_a_column() -> None:
    of_run = rebalance.Run([answered(10.5)], [(10.0, 11.0)], []).figures(rebalance.Slo(1.0, 1.0))
    data = {"by_arm": {"static": [of_run], "unified_even": [of_run]}, "runs": 1}
    text = tables_of_arms.rebalance(kept(data))
    assert "|  | `static` | `unified_even` |" in text
    assert "| first token, p50 (n = 1 a run or more) | 0.50 s | 0.50 s |" in text
    assert "| time per token, p50 | 200 ms | 200 ms |" in text


def test_replicas_that_come_and_go_are_told_over_both_other_arms() -> None:
    slo = rebalance.Slo(1.0, 1.0)
    runs = {
        arm: [rebalance.Run([answered(10.5 if arm == "auto" else 19.0)], [(10.0, 11.0)], [])]
        for arm in ("static", "auto", "unified")
    }
    data = rebalance.compared(runs, {each: runs[each] for each in ("static", "auto")},
                              ("static", "unified"), slo)  # fmt: skip
    text = tables_of_arms.rebalance_replicas(kept({**data, "runs": 1, "oscillations": [0]}))
    assert "| first token, p99 | 0.056 | 0.056 |" in text
    assert "| goodput | the other had none | the other had none |" in text
    assert text.endswith("by run: 0.")
    added = {"at_s": 1.0, "action": "add_replica"}
    for did, said in (([added, added], "2 of `add_replica`"), ([], "no action")):
        told = {**data, "runs": 1, "oscillations": [0], "steady_actions": [did]}
        text = tables_of_arms.rebalance_replicas(kept(told))
        assert text.endswith(f"Under the steady load: {said}.")


def test_deadlines_are_told_over_first_come_first_served() -> None:
    coming = [Timed(Job(1, 1, Expected(1, 1)), at, 4.0) for at in (0.0, 1.0)]
    slow, quick = deadlines.Answer(9, 1.0, 3.0), deadlines.Answer(9, 1.0, 1.0)
    late = deadlines.Answer(9, 1.0, 5.0)
    refused = deadlines.Answer(0, math.inf, math.inf)
    of = {
        arm: deadlines.Served(coming, [quick, refused] if options.refuses else [slow, late])
        for arm, options in deadlines.ARMS.items()
    }
    assert of["fcfs"].figures()["goodput"] == pytest.approx(1 / 6)
    run = {arm: each.figures() for arm, each in of.items()}
    text = tables_of_arms.deadlines(kept(deadlines.report([run])))
    assert "1 run of n = 2 requests an arm." in text
    assert "| `fcfs` |  |  | 0.50 | 0 | 4.0 s |" in text
    assert "| `deadline_refuses` | 6.0 | 1.0 | 0.50 | 1 | 1.0 s |" in text
    assert text.endswith("`deadline_refuses` has 1.0.")


def test_adaptive_is_told_over_each_other_arm() -> None:
    def served(seconds: float) -> AdaptiveServed:
        return AdaptiveServed(seconds, [[1] * 10] * 4, 2 * seconds, 3.0, 0.0, 1.0, {})

    run = {"recompute": served(2.0), "adaptive": served(1.0), "adaptive_fcfs": served(1.0)}
    setting = Setting("chat", 128, 64)
    data = {
        **adaptive.headline({setting: [run]}),
        "points": [adaptive.point(setting, [run])],
        "runs": 1,
    }
    text = tables_of_arms.adaptive(kept(data, sets=["chat"], arms=list(run)))
    assert "| adaptive over |  | chat (n = 4 a run) |" in text
    assert "| `recompute` | throughput | 2.00 |" in text
    assert "| `adaptive_fcfs` | turnaround | 1.00 |" in text


def test_a_start_is_told_beside_that_of_vllms_servers() -> None:
    figure = {"median": 20.0, "min": 19.0, "max": 22.0}
    data = {
        "two_engines_ready_s": figure,
        "two_vllm_servers_start_s": {"median": 40.0, "min": 38.0, "max": 44.0},
        "start_ratio": {"median": 0.5, "min": 0.5, "max": 0.5},
        "engine_back_s": {"median": 4.0, "min": 3.0, "max": 5.0},
    }
    text = tables_of_arms.start(kept(data, runs=3))
    assert text.startswith("3 runs.")
    assert "| Loomserve with two models, until both have answered | 20 s (19 to 22) |" in text
    assert "| the first over the second | 0.50 |" in text


def test_the_stores_speed_is_told_against_the_machines() -> None:
    def of(*values: float) -> dict[str, Any]:
        return store.spread(values)

    data = {
        "spread": {name: of(2, 3, 4) for name in ("get_gbps", "put_gbps", "ssd_get_gbps")},
        "get_over_memcpy": of(0.6, 0.7, 0.8),
        "put_over_memcpy": of(0.5, 0.5, 0.5),
        "ssd_get_over_raw": of(1, 1, 1),
        "ssd_threads": 4,
        "lookup_us_p50": {"10000": of(440, 450, 460)},
        "lookup_us_n": 200,
        "hidden_share": {"load": {"median": 1.0, "min": 0.9}},
        "runs": 3,
    }
    text = tables.store(kept(data))
    assert "| 3.0 GB/s (2.0 to 4.0) | 0.70 (0.60 to 0.80) of plain copies" in text
    assert (
        "p50 of 200 a run, by the blocks that it finds and leases: 10,000 | 450 µs (440 to 460)"
        in text
    )
    assert "| 1.0, the least 0.90 |" in text


def test_nothing_is_told_of_a_file_that_is_not_cited() -> None:
    missing = [name for name in tables_of_arms.TABLES if not (CITED / f"{name}.json").exists()]
    texts = [tables_of_arms.TEXTS[name.replace("_", "-")]() for name in missing]
    assert texts == [""] * len(missing)
    assert tables_of_arms.of_file("decisions", lambda result: result.commit)().endswith(
        Result.read(CITED / "decisions.json").commit
    )


def test_batches_are_told_by_what_was_really_served() -> None:
    figure = {"median": 1.3, "min": 1.2, "max": 1.4}
    names = ("throughput", "mean_response_s", "p95_response_s")
    data = {"real_over_vanilla": {"s3": dict.fromkeys(names, figure)}, "real": [{}, {}, {}]}
    text = tables_of_arms.batching(kept(data, real_requests=100))
    assert text.startswith("3 runs of n = 100 requests an arm.")
    assert "| `s3` | 1.30 (1.20 to 1.40) | 1.30 (1.20 to 1.40) | 1.30 (1.20 to 1.40) |" in text
