"""Tables of one mechanism by itself: moves of shards, HELR's map, the KV store, continuation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.report import Spread
from benchmarks.result_files import Result, cited
from benchmarks.table_text import counted_runs, figure, number, spread, with_head

TIMES = "\N{MULTIPLICATION SIGN}"


def migrate(result: Result) -> str:
    """How streams fare while heads or layers of theirs move."""
    loads = dict.fromkeys(name.partition(" ")[2] for name in result.data["by_load"])

    def of_kind(kind: str, load: str) -> list[str]:
        of = result.data["by_load"][f"{kind} {load}"]
        return [
            f"{number(of[f'{kind}_pause_ms_p99'])} ms, {number(of[f'{kind}_pause_steps_p99'])} "
            f"(n = {of[f'{kind}_pause_ms_n']})",
            f"{number(of[f'{kind}_move_ms'] / 1000)} s",
            spread(of[f"{kind}_step_while_away"]),
        ]

    rows = [
        [load.replace("x", f" {TIMES} "), *of_kind("head", load), *of_kind("layer", load)]
        for load in loads
    ]
    of_part = ("longest pause, and in steps", "a move", "a step while they are away")
    head = [
        f"streams {TIMES} context",
        *(f"{part}: {what}" for part in ("heads", "layers") for what in of_part),
    ]
    changed = f"Tokens that changed: {result.data['tokens_changed']}."
    runs = counted_runs(result.data["runs"])
    return f"{with_head(f'{runs}.', head, rows)}\n\n{changed}"


def helr(result: Result) -> str:
    """Splits of a model over two cores of which one is slow, the best first."""
    data = result.data
    every = sorted(data["by_split"], key=lambda each: each["helr_vs_it"]["median"])
    rows = [
        [
            each["split"],
            number(each["tokens_per_second"], 3),
            spread(each["helr_vs_it"], digits=3),
            number(each["predicted_period_ms"] / data["predicted_period_ms"], 3),
        ]
        for each in every
    ]
    head = ["split", "tokens/s", f"of {data['helr']} (HELR's) over it", "predicted"]
    best = f"Against the best of them, measured once more: {figure(data, 'share_of_best')}."
    said = (
        f"{counted_runs(data['runs'])} of each pair; a layer takes "
        f"{number(1 / data['speed_of_slow_core'])} times as long on the slow core."
    )
    return f"{with_head(said, head, rows)}\n\n{best}"


def transfer(result: Result) -> str:
    """What share of the store's transfers the forward pass hid, and how far that was foreseen."""
    data = result.data
    speeds = {"memory": "shared memory", "links": "links of 8 to 256 MB/s"}
    rows = [
        [
            where,
            *(_hidden(data[speed], way) for way in ("load", "save")),
            *(
                f"{number(off['median'])}, at most {number(off['max'])}"
                for off in (data["prediction_error"][kind][speed] for kind in ("paper", "stages"))
            ),
        ]
        for speed, where in speeds.items()
    ]
    head = [
        *("store behind", "share of a load that is hidden", "of a save"),
        *("the paper's prediction is off by", "the one by stages"),
    ]
    points = {speed: len(data[speed]) for speed in speeds}
    said = (
        f"{counted_runs(data['runs'])} of {points['memory']} prompts, and of {points['links']} "
        "through links; a figure is the median of a prompt's runs."
    )
    return with_head(said, head, rows)


def _hidden(points: list[Mapping[str, float]], way: str) -> str:
    shares = [each[f"{way}_hidden_share"] for each in points]
    return spread(asdict(Spread.of(shares)), digits=3)


def disaggregation(result: Result) -> str:
    """A prefill and a decode replica over two that do both, by trace."""
    data = result.data
    names = {
        "tpot_p99_ratio": "time per output token, p99 over requests",
        "itl_p99_ratio": "gap between two tokens, p99",
        "ttft_p50_ratio": "first token, median",
        "ttft_p99_ratio": "first token, p99",
        "goodput_ratio": "goodput",
    }
    traces = {name.removesuffix(".csv.gz"): each for name, each in data["traces"].items()}
    rows = [
        [what, *(figure(each, name) for each in traces.values())] for name, what in names.items()
    ]
    head = [
        "separated over unified",
        *(
            f"`{name}` (n = {each['requests']} a run, {number(each['rate'])} a second)"
            for name, each in traces.items()
        ),
    ]
    return with_head(f"{counted_runs(data['runs'])} of each pair.", head, rows)


def separated_over_unified(trace: str, name: str) -> Callable[[], str]:
    """A ratio of one of :func:`disaggregation`'s traces, within a sentence."""
    return lambda: figure(cited("disaggregation").figure("traces", f"{trace}.csv.gz"), name)


def step_overhead(result: Result) -> str:
    """What a step of a tiny model takes longer than vLLM's own, by how many requests it has."""
    data = result.data
    counts = list(data["step_us"]["vllm"])
    names = {
        "scheduler": "with our worker and scheduler, longer by",
        "store": "with the KV store, too, longer by",
    }
    rows = [
        ["vLLM's own", *(spread(data["step_us"]["vllm"][of], "µs") for of in counts)],
        *(
            [name, *(spread(data["more_than_vllm_us"][arm][of], "µs") for of in counts)]
            for arm, name in names.items()
        ),
    ]
    head = ["a step of a tiny model", *(f"{of} requests" for of in counts)]
    return with_head(f"{counted_runs(len(data['runs']))}.", head, rows)


def continuation(result: Result) -> str:
    """What clients see when an engine is killed or drained in mid-stream."""
    data = result.data

    def row(of: Mapping[str, Any]) -> list[str]:
        name, _, _ = of["scenario"].partition(",")
        what = name.replace("kill_at_", "killed at token ").replace("drain", "drained")
        medians = of["pause_ms_p50_by_run"]
        return [
            what,
            str(of["streams"]),
            f"{of['context']:,} tokens" if of["context"] else "none",
            spread(asdict(Spread.of(medians)) | {"median": of["pause_ms_p50"]}, "ms"),
            f"{number(of['pause_ms_p99'])} ms (n = {of['pause_ms_n']})",
            f"{number(of['others_gap_ms_p50'])} ms",
            spread(asdict(Spread.of(of["drain_s"])), "s") if of["drain_s"] else "",
        ]

    tokens = data["scenarios"][0]["tokens"]
    said = (
        f"{counted_runs(data['runs'])} of each, streams of {tokens} tokens: "
        f"{data['lost_streams']} streams lost, {data['wrong_tokens']} different."
    )
    head = [
        *("", "streams", "context", "pause, p50 and of runs", "p99"),
        *("longest gaps of the others, p50", "empty after"),
    ]
    return with_head(said, head, [row(of) for of in data["scenarios"]])


def pause_of(scenario: str) -> Callable[[], str]:
    """The median pause of a scenario, within a sentence."""

    def text() -> str:
        (of,) = (
            one for one in cited("continuation").data["scenarios"] if one["scenario"] == scenario
        )
        return f"{number(of['pause_ms_p50'] / 1000)} s"

    return text


def front_end(result: Result) -> str:
    """What one front end passes on beside vLLM's serving layer alone."""
    data = result.data
    kinds = {"chunks": "chunks of streams", "whole": "whole answers"}
    rows = [
        [
            name,
            spread(data["per_core_s"][f"{kind}_bare"], digits=3),
            spread(data["per_core_s"][kind], digits=3),
            spread(data["over_bare"][kind], digits=3),
            number(data["goals"][kind]),
        ]
        for kind, name in kinds.items()
    ]
    head = ["a second of one core", "vLLM's serving layer alone", "front end", "over it", "goal"]
    return with_head(f"{counted_runs(result.setup['runs'])}.", head, rows)


def adaptive_simulated(result: Result) -> str:
    """What queues would gain over stock vLLM by knowing all lengths."""
    arms = {"adaptive_fcfs": "first come", "fair_known": "fair", "sjf_known": "shortest first"}
    figures = {"throughput": "throughput", "weighted_turnaround": "weighted turnaround"}
    rows = [
        [
            f"{point['lengths']}, {point['max_output']}",
            f"{100 * point['cut_share']:.0f} %",
            f"{point['step_ms']:g} + {point['token_ms']:g}",
            *(number(point["over_stock"][arm][of], 3) for of in figures for arm in arms),
        ]
        for point in result.data["points"]
    ]
    head = [
        "requests, answers of at most",
        "cut off",
        "ms a step, a token",
        *(f"{what}: {arm}" for what in figures.values() for arm in arms.values()),
    ]
    return with_head(f"n = {result.setup['requests']} requests each.", head, rows)


TABLES: Mapping[str, Callable[[Result], str]] = {
    "migrate": migrate,
    "helr": helr,
    "transfer": transfer,
    "disaggregation": disaggregation,
    "step_overhead": step_overhead,
    "continuation": continuation,
    "front_end": front_end,
    "adaptive_simulated": adaptive_simulated,
}
"""By the name of the file."""
