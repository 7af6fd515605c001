"""Tables of benchmarks whose arms are compared: overhead, starts, weaving, prefixes, queues, moves.

A table whose file is not cited is empty: its page keeps what it says without one.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.report import Spread
from benchmarks.result_files import CITED, Result, cited
from benchmarks.table_text import counted_runs, figure, number, sources, spread, table, with_head

Rows = list[list[str]]

_LOADS = {"1": "1 stream", "8": "8 streams", "32": "32 streams", "64": "64 streams"}


def _ratio(of: Mapping[str, Any], name: str, unit: str = "") -> str:
    return figure(of, name, unit, 3) if name in of else ""


def overhead_of(file: str, arm: str, load: str) -> Callable[[], str]:
    """Output tokens of an arm over bare vLLM's, within a sentence."""
    return lambda: _ratio(cited(file).data["comparisons"][arm], f"throughput_ratio_{load}")


def overhead_source() -> str:
    results = [cited(name) for name in ("overhead", "overhead_default")]
    commits = " and ".join(result.commit for result in results)
    return f"{results[0].day}, commits {commits}, {results[0].setup['plan']['runs']} pairs"


def overhead_of_models(result: Result) -> str:
    """Without the default configuration, which has a later file."""
    comparisons = {arm: of for arm, of in result.data["comparisons"].items() if arm != "default"}
    return overhead(replace(result, data={**result.data, "comparisons": comparisons}))


def overhead(result: Result) -> str:
    """Each arm over bare vLLM; the first column is what two equal arms differ by."""
    found: Mapping[str, Mapping[str, Any]] = result.data["comparisons"]

    def asked(load: str) -> str:
        each = next(iter(found.values()))
        return str(next(iter(each["absolute"].values()))[load]["requests"])

    loads = [load for load in _LOADS if f"throughput_ratio_{load}" in next(iter(found.values()))]
    rows = [
        [
            f"output tokens/s, {_LOADS[load]} (n = {asked(load)})",
            *(_ratio(of, f"throughput_ratio_{load}") for of in found.values()),
        ]
        for load in loads
    ]
    if any("ttft_added_ms_p50" in of for of in found.values()):
        later = (_ratio(of, "ttft_added_ms_p50", "ms") for of in found.values())
        rows.append([f"median first token, later by (n = {asked('first')})", *later])
    rows.append(["memory at rest", *(f"{number(of['memory_gib'])} GiB" for of in found.values())])
    rows.append(["cores at rest", *(number(of["idle_cores"]) for of in found.values())])
    runs = next(iter(found.values()))["runs"]
    return with_head(f"{runs} pairs of each arm.", ["", *found], rows)


def weave(result: Result) -> str:
    """Each arm's own figures, then what is woven over the others."""
    by_arm = result.data["by_arm"]
    rows = []
    for arm, by_rate in by_arm.items():
        for rate, of in by_rate.items():
            rows.append(
                [
                    arm,
                    rate,
                    number(of["hot_tokens_per_second"], 3),
                    f"{number(of['hot_tpot_ms_mean'])} ms (n = {of['hot_tpot_ms_n']})",
                    str(of["hot_given_up"]),
                    f"{number(of['cold_tpot_ms_mean'])} ms",
                    f"{number(of['cold_tpot_ms_p99'])} ms (n = {of['cold_tpot_ms_n']})",
                ]
            )
    head = [
        *("arm", "hot requests/s", "hot tokens/s", "hot time per token", "hot given up"),
        *("cold time per token", "p99"),
    ]
    names = {
        "hot_peak_vs_stock": "hot tokens/s over stock vLLM",
        "hot_peak_vs_dedicated": "over nothing lent",
        "hot_peak_vs_multiplexed": "over both models on both cores",
        "share_of_all_local": "over all memory its own",
        "hot_tpot_vs_dedicated_at_peak": "hot time per token over nothing lent",
        "cold_tpot_ratio_mean": "cold time per token over nothing lent",
        "cold_tpot_ratio_p99": "its p99 "
        f"(n = {min(result.data['cold_tpot_ratio_p99_n'])} a run and arm)",
    }
    ratios = [
        [what, spread(result.data[name], digits=3)]
        for name, what in names.items()
        if name in result.data
    ]
    of_runs = f"woven, {result.data['runs']} runs"
    return "\n\n".join([_blocks(result.data), table(head, rows), table(["", of_runs], ratios)])


def weave_curve(result: Result) -> str:
    """What is gained by how much is lent of the same memory."""
    curve = result.data["by_lent_over_own"]
    head, rows = _woven_over_others(curve.values())
    before = [
        [f"{float(ratio):g}", f"{of['blocks']['own']} and {of['blocks']['lent']}"]
        for ratio, of in curve.items()
    ]
    return with_head(
        f"{counted_runs(result.data['runs'])}.",
        ["lent over own", "blocks own and lent", *head],
        [[*first, *rest] for first, rest in zip(before, rows, strict=True)],
    )


def weave_budgets(result: Result) -> str:
    """What it costs the hot model that its lender is disturbed less."""
    compared = {"as it comes": result.data, **result.data["by_tpot_budget"]}
    head, rows = _woven_over_others(compared.values())
    return with_head(
        f"{counted_runs(result.data['runs'])}.",
        ["`tpot_budget`", *head],
        [[budget, *rest] for budget, rest in zip(compared, rows, strict=True)],
    )


def _woven_over_others(compared: Collection[Mapping[str, Any]]) -> tuple[list[str], Rows]:
    """Columns' heads and the rows, without arms that were not run."""
    names = {
        "hot_peak_vs_stock": "hot tokens/s over stock vLLM",
        "hot_peak_vs_dedicated": "hot tokens/s over nothing lent",
        "share_of_all_local": "over all memory its own",
        "cold_tpot_ratio_mean": "cold time per token over nothing lent",
    }
    names = {name: head for name, head in names.items() if all(name in of for of in compared)}
    rows = [
        [
            *(spread(of[name], digits=3) for name in names),
            f"{spread(of['cold_tpot_ratio_p99'], digits=3)}; "
            f"n = {min(of['cold_tpot_ratio_p99_n'])} a run",
        ]
        for of in compared
    ]
    return [*names.values(), "its p99"], rows


def lent_share(result: Result) -> str:
    data = result.data
    rows = [
        [
            f"{100 * float(share):.0f} %",
            *(spread(data[f"{of}_tpot"][share], digits=3) for of in ("hot", "cold")),
            str(data["by_share"][share]["cold_tpot_ms_n"]),
        ]
        for share in data["hot_tpot"]
    ]
    head = ["requests lent", "hot time per token over 0 %", "cold", "cold requests"]
    return with_head(f"{counted_runs(data['runs'])}.", head, rows)


def prefix(result: Result) -> str:
    rows = []
    for pair, of in result.data["pairs"].items():
        first, second = of["hit_rate"]
        asked = of["by_run"][0][first]["ttft_ms_n"]
        rows.append(
            [
                pair.replace("_vs_", " over ").replace("_", " "),
                spread(of["ttft_p50_ratio"]),
                f"{spread(of['ttft_p99_ratio'])}; n = {asked} a run",
                f"{number(of['hit_rate'][first])}, {number(of['hit_rate'][second])}",
            ]
        )
    head = ["", "TTFT, median", "TTFT, p99", "hit rates"]
    return with_head(f"{counted_runs(result.data['runs'])} of each pair.", head, rows)


def documents(result: Result) -> str:
    """What was asked again and after a restart, the first arm over the others; then each arm."""
    data, by_run = result.data, result.data["by_run"]
    ours, *others = by_run[0]
    parts = {
        "all": "all rounds",
        "first": "the first round",
        "again": "the rounds after it",
        "after_restart": "after a restart of all engines",
    }

    def asked(part: str) -> int:
        return int(by_run[0][ours][part]["ttft_ms_n"])

    ratios = [
        [
            f"{what}, {said} (n = {asked(part)} a run and arm)",
            *(spread(data["over"][other][part][figure]) for other in others),
        ]
        for figure, what in (("ttft_p50", "median TTFT"), ("seconds", "time"))
        for part, said in parts.items()
        if figure == "ttft_p50" or part in ("all", "after_restart")
    ]

    def median(arm: str, part: str, figure: str) -> float:
        return float(statistics.median(run[arm][part][figure] for run in by_run))

    own = [
        [
            f"`{arm}`",
            *(
                f"{number(median(arm, part, 'ttft_ms_p50') / 1000)} s, "
                f"{number(median(arm, part, 'hit_rate'))}"
                for part in parts
            ),
        ]
        for arm in by_run[0]
    ]
    over = table([f"`{ours}` over", *(f"`{other}`" for other in others)], ratios)
    head = ["median TTFT, hit rate", *parts.values()]
    return f"{with_head(f'{counted_runs(len(by_run))}.', head, own)}\n\n{over}"


def rebalance(result: Result) -> str:
    arms: Mapping[str, list[Mapping[str, Any]]] = result.data["by_arm"]

    def row(what: str, name: str, unit: str = "") -> list[str]:
        medians = (statistics.median(run[name] for run in runs) for runs in arms.values())
        return [what, *(f"{number(each)} {unit}".rstrip() for each in medians)]

    asked = min(run["ttft_s_n"] for runs in arms.values() for run in runs)
    rows = [
        row("output tokens a second within bursts", "throughput"),
        row("goodput, requests a second", "goodput"),
        row(f"first token, p50 (n = {asked} a run or more)", "ttft_s_p50", "s"),
        row("p99", "ttft_s_p99", "s"),
        row("time per token, p50", "tpot_ms_p50", "ms"),
        row("p99", "tpot_ms_p99", "ms"),
        row("moves", "moves"),
        row("requests that failed", "failed"),
    ]
    runs = result.data["runs"]
    said = f"Medians of {runs} runs." if runs > 1 else "One run of each arm."
    return with_head(said, ["", *(f"`{arm}`" for arm in arms)], rows)


def lent_goodput() -> str:
    """Goodput of lending without the controller over static placement's, within a sentence."""
    arms = cited("rebalance").data["by_arm"]
    lent, static = ([run["goodput"] for run in arms[arm]] for arm in ("lent", "static"))
    return spread(asdict(Spread.of_ratios(lent, static)))


def rebalance_replicas(result: Result) -> str:
    """The arms, then what the controller's replicas gain over the others."""
    data = result.data
    names = {
        "throughput": "output tokens a second within bursts",
        "goodput": "goodput",
        "p99_ttft": "first token, p99",
        "p99_tpot": "time per token, p99",
    }
    rows = [
        [what, *(_or_none(data[f"{name}_vs_{base}"]) for base in ("static", "unified"))]
        for name, what in names.items()
    ]
    rows += [
        [f"steady load, {name}", _or_none(data[f"steady_{name}_vs_static"]), ""]
        for name in ("throughput", "goodput")
    ]
    over = table(["`auto` over", "`static`", "`unified`"], rows)
    moves = ", ".join(map(str, data["oscillations"]))
    undone = f"Replicas that came and went in one phase, by run: {moves}."
    if "steady_actions" in data:
        undone += f" Under the steady load: {_named(data['steady_actions'])}."
    return f"{rebalance(result)}\n\n{over}\n\n{undone}"


def _named(runs: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Actions of all runs, each kind with how often it was taken."""
    counts = Counter(each["action"] for one in runs for each in one)
    return ", ".join(f"{count} of `{name}`" for name, count in counts.items()) or "no action"


def _or_none(of: Mapping[str, float] | None) -> str:
    return "the other had none" if of is None else spread(of)


def deadlines(result: Result) -> str:
    """Each arm over first come, first served, and what it did itself."""
    data, runs = result.data, result.data["by_run"]

    def median(arm: str, figure: str) -> float:
        return float(statistics.median(run[arm][figure] for run in runs))

    rows = [
        [
            f"`{arm}`",
            *(
                spread(data["over_fcfs"][arm][figure]) if arm in data["over_fcfs"] else ""
                for figure in ("goodput", "attainment")
            ),
            number(median(arm, "attainment")),
            f"{median(arm, 'refused'):.0f}",
            f"{number(median(arm, 'mean_latency_s'))} s",
        ]
        for arm in runs[0]
    ]
    head = [
        *("", "goodput over first come, first served", "requests in time over it"),
        *("share in time", "refused", "mean latency of what was answered"),
    ]
    asked = min(each["requests"] for run in runs for each in run.values())
    said = f"{counted_runs(data['runs'])} of n = {asked} requests an arm."
    known = (
        f"Of the goodput of known lengths `deadline_refuses` has {spread(data['share_of_known'])}."
    )
    return f"{with_head(said, head, rows)}\n\n{known}"


def slo(result: Result) -> str:
    """Each queue's goodput over first come, first served, by what is known of lengths."""
    data = result.data
    arms, over = data["arms"], data["goodput_vs_fcfs"]
    rows = [
        [
            f"`{arm.partition('_')[0]}`",
            arm.partition("_")[2],
            spread(over[arm], digits=3) if arm in over else "",
            number(of["attainment"]),
            f"{number(of['mean_latency_s'])} s",
        ]
        for arm, of in arms.items()
    ]
    head = [
        *("queue", "lengths", "goodput over first come, first served"),
        *("share in time", "mean latency"),
    ]
    said = f"{counted_runs(data['runs'])} of n = {arms['fcfs']['requests']} requests an arm."
    known = "; ".join(f"`{queue}` {spread(of)}" for queue, of in data["share_of_oracle"].items())
    return (
        f"{with_head(said, head, rows)}\n\nOf the goodput of known lengths predicted ones have: "
        f"{known}. Predictions are off by {number(data['predicted_mae'])} tokens in the mean."
    )


def adaptive(result: Result) -> str:
    data = result.data
    sets = result.setup["sets"]
    others = [arm for arm in result.setup["arms"] if arm != "adaptive"]
    asked = {
        point["lengths"]: min(run["adaptive"]["requests"] for run in point["by_run"])
        for point in data["points"]
    }
    rows = [
        [
            f"`{other}`",
            what,
            *(spread(data[f"{name}_vs_{other}_{each}"], digits=3) for each in sets),
        ]
        for other in others
        for name, what in (
            ("throughput", "throughput"),
            ("turnaround", "turnaround"),
            ("weighted_turnaround", "weighted turnaround"),
        )
    ]
    head = ["adaptive over", "", *(f"{each} (n = {asked[each]} a run)" for each in sets)]
    return with_head(f"{counted_runs(data['runs'])}.", head, rows)


def batching(result: Result) -> str:
    """What each policy gained of requests that were really served."""
    data = result.data
    figures = {
        "throughput": "throughput",
        "mean_response_s": "mean response",
        "p95_response_s": "response, p95",
    }
    rows = [
        [f"`{arm}`", *(spread(of[figure], digits=3) for figure in figures)]
        for arm, of in data["real_over_vanilla"].items()
    ]
    asked = result.setup["real_requests"]
    said = f"{counted_runs(len(data['real']))} of n = {asked} requests an arm."
    return with_head(said, ["over `vanilla`", *figures.values()], rows)


def start(result: Result) -> str:
    data = result.data
    rows = [
        [
            "Loomserve with two models, until both have answered",
            spread(data["two_engines_ready_s"], "s"),
        ],
        ["two of vLLM's own servers", spread(data["two_vllm_servers_start_s"], "s")],
        ["the first over the second", spread(data["start_ratio"])],
        ["another engine in the place of one that was killed", spread(data["engine_back_s"], "s")],
    ]
    return with_head(f"{counted_runs(result.setup['runs'])}.", ["", "measured"], rows)


def _blocks(of: Mapping[str, Any]) -> str:
    blocks = of["blocks"]
    return (
        f"Of {sum(blocks.values())} blocks the hot model has {blocks['own']}, and {blocks['lent']} "
        "of the cold one's are lent where something is."
    )


def of_file(name: str, made: Callable[[Result], str]) -> Callable[[], str]:
    """What is made of a file, under where that is from; nothing while it is not cited."""

    def text() -> str:
        if not (CITED / f"{name}.json").exists():
            return ""
        return f"{sources(name)}\n\n{made(cited(name))}"

    return text


def spread_of(name: str, *path: str, digits: int = 2) -> Callable[[], str]:
    """A figure of a file with its spread, within a sentence."""
    return lambda: spread(cited(name).figure(*path), digits=digits)


TABLES: Mapping[str, Callable[[Result], str]] = {
    "overhead": overhead_of_models,
    "overhead_default": overhead,
    "overhead_default_epyc": overhead,
    "overhead_default_long": overhead,
    "weave": weave,
    "weave_curve": weave_curve,
    "weave_budgets": weave_budgets,
    "lent_share": lent_share,
    "prefix": prefix,
    "prefix_pairs": prefix,
    "documents": documents,
    "rebalance": rebalance,
    "rebalance_roles": rebalance,
    "rebalance_replicas": rebalance_replicas,
    "rebalance_simulated": rebalance_replicas,
    "rebalance_simulated_within": rebalance_replicas,
    "slo": slo,
    "deadlines": deadlines,
    "adaptive": adaptive,
    "queues_without_predictions": adaptive,
    "adaptive_chat": adaptive,
    "adaptive_documents": adaptive,
    "batching": batching,
    "start": start,
}
"""By the name of the file, ``_`` standing for ``-`` in the name of the marker."""
TEXTS = {
    **{name.replace("_", "-"): of_file(name, made) for name, made in TABLES.items()},
    **{
        f"overhead-{name}-{load}": overhead_of(file, arm, load)
        for name, file, arm in (
            ("loomserve", "overhead", "loomserve"),
            ("default", "overhead_default", "default"),
            ("epyc", "overhead_default_long", "default"),
        )
        for load in ("8", "32")
    },
    "overhead-source": overhead_source,
    "woven-over-nothing": spread_of("weave", "hot_peak_vs_dedicated", digits=3),
    "woven-over-stock": spread_of("weave", "hot_peak_vs_stock", digits=3),
    "replicas-goodput": spread_of("rebalance_replicas", "goodput_vs_static"),
    "replicas-tokens": spread_of("rebalance_replicas", "throughput_vs_static"),
    "replicas-first-token": spread_of("rebalance_replicas", "p99_ttft_vs_static"),
    "simulated-tokens": spread_of("rebalance_simulated", "throughput_vs_static"),
    "simulated-tokens-unified": spread_of("rebalance_simulated", "throughput_vs_unified"),
    "simulated-goodput": spread_of("rebalance_simulated", "goodput_vs_static"),
    "simulated-within-tokens": spread_of("rebalance_simulated_within", "throughput_vs_static"),
    "simulated-within-goodput": spread_of("rebalance_simulated_within", "goodput_vs_static"),
    "shifts-tokens": spread_of("rebalance", "throughput_vs_static", digits=3),
    "shifts-goodput": spread_of("rebalance", "goodput_vs_static"),
    "shifts-lent-goodput": lent_goodput,
    "shifts-first-token": spread_of("rebalance", "p99_ttft_vs_static"),
    "shifts-steady": spread_of("rebalance", "steady_throughput_vs_static", digits=3),
    **{
        f"slo-{arm.replace('_', '-')}": spread_of("slo", "goodput_vs_fcfs", arm, digits=3)
        for arm in ("deadline_predicted", "deadline_perfect", "deadline_none", "sjf_predicted")
    },
    "prefix-over-none": spread_of("prefix", "pairs", "store_vs_no_store", "ttft_p50_ratio"),
    "prefix-over-stock": spread_of("prefix", "pairs", "store_vs_stock", "ttft_p50_ratio"),
    "documents-again": spread_of("documents", "over", "no_store", "again", "ttft_p50"),
    "documents-by-prefix": spread_of("documents", "over", "prefix_router", "again", "ttft_p50"),
    "documents-restarted": spread_of("documents", "over", "stock", "after_restart", "ttft_p50"),
}
