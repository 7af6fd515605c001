"""Tables of one mechanism by itself: moves of shards, HELR's map, the KV store, continuation, the
ring of lending."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from benchmarks.report import Spread
from benchmarks.result_files import Result, cited
from benchmarks.table_text import counted_runs, figure, number, spread, table, with_head

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


def longest_pauses() -> str:
    """The least and the greatest of the loads' longest pauses, in steps, within a sentence."""
    by_load: Mapping[str, Mapping[str, Any]] = cited("migrate").data["by_load"]
    steps = [of[f"{name.partition(' ')[0]}_pause_steps_p99"] for name, of in by_load.items()]
    return f"{number(min(steps))} to {number(max(steps))}"


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
    """What queues would gain over stock vLLM by knowing all lengths, and what without."""

    def rows(arms: Mapping[str, str], figures: Mapping[str, str]) -> str:
        head = [
            "requests, answers of at most",
            "cut off",
            "ms a step, a token",
            *(f"{what}: {arm}" for what in figures.values() for arm in arms.values()),
        ]
        made = [
            [
                f"{point['lengths']}, {point['max_output']}",
                f"{100 * point['cut_share']:.0f} %",
                f"{point['step_ms']:g} + {point['token_ms']:g}",
                *(number(point["over_stock"][arm][of], 3) for of in figures for arm in arms),
            ]
            for point in result.data["points"]
        ]
        return table(head, made)

    both = {"throughput": "throughput", "weighted_turnaround": "weighted turnaround"}
    first = {"adaptive_fcfs": "first come"}
    known = rows(
        {
            **first,
            "fair_known": "fair",
            "sjf_known": "shortest first",
            "fair_predicted": "fair, predicted",
        },
        both,
    )
    without = rows(
        {**first, "feedback": "feedback", "feedback_at_once": "feedback, at once"},
        {**both, "turnaround": "turnaround"},
    )
    asked = f"n = {result.setup['requests']} requests each."
    return f"{asked} Lengths known, or predicted:\n\n{known}\n\nNot known:\n\n{without}"


def ring(result: Result) -> str:
    """What a task of lending costs beyond its attention, by rows and by who looks for it."""
    figures: Mapping[str, Mapping[str, Any]] = result.data["us_a_layer"]
    counts = [name.rpartition("_")[2] for name in figures if name.startswith("native_polling_")]
    shown = {
        ("native", "polling"): "C++, the lender polls between operators",
        ("native", "idle"): "C++, the lender's engine is idle",
        ("python", "polling"): "Python, polling",
        ("python", "idle"): "Python, idle",
    }
    rows = [
        [what, *(spread(figures[f"{how}_{lender}_{of}"]["beyond_us"], "µs") for of in counts)]
        for (how, lender), what in shown.items()
    ]
    runs, context = counted_runs(result.data["runs"]), result.data["context_tokens"]
    said = f"{runs}, {context} tokens of context; a layer's, beyond its attention."
    looked = f"A look that finds no task takes {spread(result.data['empty_poll_ns'], 'ns')}."
    return f"{with_head(said, ['rows in the task', *counts], rows)}\n\n{looked}"


def nodes_kv(result: Result) -> str:
    """What it takes to find and fetch blocks of another node, against the goals."""
    data = result.data

    def row(what: str, name: str, unit: str, goal: str, digits: int = 2) -> list[str]:
        return [what, spread(data["spread"][name], unit, digits), goal]

    def percentile(what: str, name: str, unit: str, goal: str) -> list[str]:
        asked = f"{data[name.rpartition('_')[0] + '_n']:,}"
        return row(f"{what}, p{name[-2:]} of {asked} a run", name, unit, goal)

    beside = "a lookup of an engine"
    rows = [
        percentile(
            f"a chain of 128 blocks in a directory of {data['directory_blocks']:,.0f} entries",
            *("directory_chain128_us_p99", "µs", "200 µs"),
        ),
        row("such lookups a second of a core", "directory_lookups_per_s", "", "20,000", 3),
        percentile(
            "from the answer to a commit until the other node knows of the block",
            *("event_visible_ms_p99", "ms", "50 ms"),
        ),
        row("fetched and verified", "fetch_gb_per_s", "GB/s", "1.2 GB/s", 3),
        row("CPU of both stores", "fetch_cpu_s_per_gb", "s/GB", "0.6 s/GB"),
        row("plain copies between the two arenas", "copy_cpu_s_per_gb", "s/GB", ""),
        percentile(f"{beside} while blocks are fetched", "lookup_beside_fetch_ms_p50", "ms", ""),
        percentile("the same", "lookup_beside_fetch_ms_p99", "ms", "1 ms"),
        percentile(
            f"{beside} beside two processes that only compute",
            *("lookup_beside_busy_cores_ms_p99", "ms", ""),
        ),
    ]
    first = data["fetch_first"]
    cold = (
        f"The first fetch into an arena, which maps its pages: {number(first['gb_per_s'])} GB/s, "
        f"{number(first['cpu_s_per_gb'])} s/GB of CPU (once)."
    )
    said = f"{counted_runs(data['runs'])}."
    return f"{with_head(said, ['what', 'measured', 'goal'], rows)}\n\n{cold}"


def batch_dependence(result: Result) -> str:
    """How many answers differ from those of all requests at once."""
    names = {"all_again": "all at once again", "seven": "seven at once", "one": "one at a time"}
    kinds = [name for name in result.data if name.startswith("differ_in_")]
    rows = [
        [what, *(str(result.data[kind][name]) for kind in kinds)] for name, what in names.items()
    ]
    head = ["", *(kind.removeprefix("differ_in_") for kind in kinds)]
    said = f"Of {result.data['of']} answers, how many differ from those computed all at once:"
    return with_head(said, head, rows)


def ray_idle(result: Result) -> str:
    """Processor time of Ray Serve whose replicas do nothing, and whose it is."""
    by_process: Mapping[str, float] = result.data["by_process"]
    kinds = {"ray::ServeController": "the controller", "ray::ServeReplica": "replicas"}
    of = {
        name: sum(cores for process, cores in by_process.items() if kind in process)
        for kind, name in kinds.items()
    }
    of["GCS, raylet, agents and logs"] = sum(by_process.values()) - sum(of.values())
    parts = ", ".join(f"{name} {number(cores)}" for name, cores in of.items())
    setup = result.setup
    return (
        f"{setup['replicas']} replicas for {setup['seconds']:g} s: "
        f"{number(result.data['ray_idle_cores'])} of a core; {parts}."
    )


def exactness(result: Result) -> str:
    """What share of greedy answers is the same, by where the prompts' KV came from."""
    data, asked = result.data, result.setup
    names = {
        "on_empty": "the store has nothing",
        "from_memory": "from its memory",
        "from_ssd": "from its disk",
        "prefill_decode": "from the replica that prefills",
    }
    shares, cached = data["identical_share"], data["cached_share"]
    rows = [
        [
            what,
            f"{round(shares[name] * asked['count'])} of {asked['count']}",
            number(cached[name]) if name in cached else "",
        ]
        for name, what in names.items()
    ]
    head = ["KV of the prompt", "the same answer as without a store", "share of tokens found"]
    said = f"Prompts of {asked['tokens']} tokens, answers of {asked['answer']}, one run."
    return with_head(said, head, rows)


def lending_exactness(_: Result) -> str:
    return f"Answers that are the same: {same_while_lenders_die()}."


def same_while_lenders_die() -> str:
    """How many answers were the same while lenders were killed, within a sentence."""
    data = cited("lending_exactness").data
    killed = data["lenders_killed"]
    return f"{data['identical']} of {data['compared']}, with {killed} lenders killed"


TABLES: Mapping[str, Callable[[Result], str]] = {
    "migrate": migrate,
    "helr": helr,
    "transfer": transfer,
    "disaggregation": disaggregation,
    "step_overhead": step_overhead,
    "continuation": continuation,
    "continuation_32": continuation,
    "ring": ring,
    "nodes_kv": nodes_kv,
    "batch_dependence": batch_dependence,
    "exactness": exactness,
    "ray_idle": ray_idle,
    "lending_exactness": lending_exactness,
    "front_end": front_end,
    "adaptive_simulated": adaptive_simulated,
}
"""By the name of the file."""
