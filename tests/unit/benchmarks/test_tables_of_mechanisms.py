"""What the tables of single mechanisms say of results."""

from __future__ import annotations

from typing import Any

from benchmarks import tables_of_mechanisms
from benchmarks.result_files import Result


def of(median: float, least: float, most: float) -> dict[str, float]:
    return {"median": median, "min": least, "max": most}


def moved(kind: str) -> dict[str, Any]:
    return {
        f"{kind}_pause_ms_p99": 21.0,
        f"{kind}_pause_ms_n": 4,
        f"{kind}_pause_steps_p99": 0.35,
        f"{kind}_move_ms": 1900.0,
        f"{kind}_step_while_away": of(0.8, 0.7, 0.9),
    }


def test_a_move_is_told_by_load_heads_beside_layers() -> None:
    by_load = {f"{kind} 8x2048": moved(kind) for kind in ("head", "layer")}
    data = {"by_load": by_load, "tokens_changed": 0, "runs": 2}
    text = tables_of_mechanisms.migrate(Result(data))
    one = "21 ms, 0.35 (n = 4) | 1.9 s | 0.80 (0.70 to 0.90)"
    assert f"| 8 \N{MULTIPLICATION SIGN} 2048 | {one} | {one} |" in text
    assert text.endswith("Tokens that changed: 0.")


def split(name: str, speed: float, ratio: dict[str, float], period_ms: float) -> dict[str, Any]:
    return {
        "split": name,
        "tokens_per_second": speed,
        "helr_vs_it": ratio,
        "predicted_period_ms": period_ms,
    }


def test_splits_stand_in_order_of_their_speed_beside_helrs() -> None:
    data = {
        "helr": "core0:27",
        "runs": 3,
        "predicted_period_ms": 10.0,
        "speed_of_slow_core": 0.4,
        "share_of_best": 0.97,
        "spread": {"share_of_best": [0.9, 1.1]},
        "by_split": [
            split("even", 100.0, of(2.0, 1.9, 2.1), 24.0),
            split("next", 220.0, of(0.98, 0.9, 1.0), 10.4),
        ],
    }
    text = tables_of_mechanisms.helr(Result(data))
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert rows[2] == "| next | 220 | 0.980 (0.900 to 1.00) | 1.04 |"
    assert rows[3] == "| even | 100 | 2.00 (1.90 to 2.10) | 2.40 |"
    assert "2.5 times as long on the slow core" in text
    assert text.endswith("measured once more: 0.97 (0.90 to 1.1).")


def test_transfers_are_told_by_what_hides_them_beside_what_was_foreseen() -> None:
    points = [{"load_hidden_share": each, "save_hidden_share": 1.0} for each in (0.5, 1.0, 1.0)]
    off = {"median": 0.01, "max": 0.5}
    errors = {"memory": off, "links": off}
    data = {
        "memory": points,
        "links": points,
        "prediction_error": {"paper": errors, "stages": errors},
        "runs": 3,
    }
    text = tables_of_mechanisms.transfer(Result(data))
    assert "3 runs of 3 prompts, and of 3 through links" in text
    foreseen = "0.010, at most 0.50"
    assert f"| shared memory | 1.00 (0.500 to 1.00) | 1.00 | {foreseen} | {foreseen} |" in text


def test_prefill_apart_is_told_by_trace_with_how_many_requests() -> None:
    ratios = [
        f"{name}_ratio" for name in ("tpot_p99", "itl_p99", "ttft_p50", "ttft_p99", "goodput")
    ]
    trace = {
        **dict.fromkeys(ratios, 0.5),
        "spread": dict.fromkeys(ratios, (0.4, 0.6)),
        "requests": 120,
        "rate": 1.52,
    }
    data = {"traces": {"conv.csv.gz": trace, "code.csv.gz": trace}, "runs": 2}
    text = tables_of_mechanisms.disaggregation(Result(data))
    assert "| `conv` (n = 120 a run, 1.5 a second) | `code` (n = 120 a run" in text
    assert "| first token, p99 | 0.50 (0.40 to 0.60) | 0.50 (0.40 to 0.60) |" in text
