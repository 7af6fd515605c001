"""Pages' figures, made from the files of results that they cite.

    python -m benchmarks.pages        or    make performance

writes them between the markers of :data:`benchmarks.pages.PAGES`; a unit test fails where a page
and a file differ. Each function here makes the text of one marker.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from benchmarks import tables_of_arms, tables_of_gpus, tables_of_mechanisms
from benchmarks.result_files import Result, cited
from benchmarks.table_text import counted_runs, number, sources, spread, table


def decisions() -> str:
    result = cited("decisions")
    found, setup = result.data, result.setup

    def medians(policy: str, rank: int) -> str:
        of = (found[f"decision_us_p{rank}"][f"{policy}_{count}"] for count in (10, 100, 1000))
        return ", ".join(number(each["median"], 3) for each in of) + " µs"

    policies = ("load_aware", "round_robin", "power_of_two", "prefix_aware")
    rows = [[f"`{name}`", medians(name, 50), medians(name, 99)] for name in policies]
    asked = f"n = {setup['decisions']:,} a run"
    head = ["policy", "p50 among 10, 100, 1,000 replicas", f"p99 ({asked}, {setup['runs']} runs)"]
    others = table(
        ["other decisions, medians", "measured", "goal"],
        [
            ["filter and pick among 1,000 replicas", spread(found["pick_us_1000"], "µs"), "25 µs"],
            ["a plan for 64 devices", spread(found["propose_s_64"]["s"], "s"), ""],
            ["for 1,000", spread(found["propose_s_1000"]["s"], "s"), "1 s"],
            [
                "for 1,000 where nothing passes",
                spread(found["propose_s_1000_nothing_passes"]["s"], "s"),
                "1 s",
            ],
            *(
                [
                    f"a pipeline of 80 layers over 1,000 devices, `{mode}`",
                    spread(found["helr_s_1000"]["s"][mode], "s"),
                    "10 s",
                ]
                for mode in ("he", "lr", "balanced")
            ),
        ],
    )
    return "\n\n".join([sources("decisions"), table(head, rows), others])


def elastic() -> str:
    found = cited("elastic").data
    runs = cited("elastic").setup["runs"]
    rows = [
        [
            f"first token of a model that is unloaded, after the request (n = {runs})",
            spread(found["first_token_unloaded_s"], "s"),
            "5 s",
        ],
        [
            "of one that was never loaded, whose front end is set up meanwhile (n = 1)",
            f"{number(found['first_token_never_loaded_s'])} s",
            "5 s",
        ],
        [
            f"of one that is asleep (n = {runs})",
            spread(found["first_token_asleep_s"], "s"),
            "0.5 s",
        ],
        [
            "start of vLLM's own server, up to its first token "
            f"(n = {cited('elastic').setup['servers']})",
            spread(found["vllm_server_start_s"], "s"),
            "",
        ],
        [
            "the first of these over the last",
            number(found["unloaded_vs_vllm"]),
            "0.33",
        ],
    ]
    return f"{sources('elastic')}\n\n{table(['what', 'measured', 'goal'], rows)}"


def scaling() -> str:
    result = cited("elastic_scaling")
    found = result.data["scale_up"]
    load, arms = found["load"], found["arms"]

    def of_runs(values: Sequence[float], unit: str = " s") -> str:
        return " and ".join(f"{number(each)}{unit}" for each in values)

    runs = len(found["second_replica_s"])
    asked = arms["scaled"]["requests"] // runs
    rows = [
        [
            f"first token, {rank} (n = {asked} a run)",
            *(of_runs(arms[arm][f"ttft_{rank}_s"]) for arm in ("scaled", "static")),
        ]
        for rank in ("p50", "p99")
    ]
    rows += [
        ["p99 over that of two replicas", f"**{spread(found['ratios'])}**", "1"],
        ["second replica after", of_runs(found["second_replica_s"]), ""],
        ["requests that failed", *(str(arms[arm]["failed"]) for arm in ("scaled", "static"))],
    ]
    head = ["", "one replica, a second with the load", "two from the beginning"]
    said = (
        f"{load['rate']:g} requests a second for {load['seconds']:g} s after "
        f"{load['calm_rate']:g} a second, answers of {load['max_tokens']} tokens; {runs} pairs "
        "of platforms, all runs."
    )
    return "\n\n".join([sources("elastic_scaling"), said, table(head, rows)])


def prefix_nodes() -> str:
    result = cited("prefix_nodes")
    found = {
        (row["stores_share_of_blocks"], row["link_gb_per_s"], row["policy"]): row
        for row in result.data["rows"]
    }

    def hits(share: float, link: float, policy: str) -> str:
        row = found[share, link, policy]
        shown = number(row["of_endless"], 3)
        return shown + (
            f", of which {number(row['fetched_of_hits'])} fetched" if row["fetched_of_hits"] else ""
        )

    policies = ("prefix_aware", "load_aware")
    rows = [
        ["all blocks" if share == 1 else f"{share:g} of them", f"{link:g} GB/s"]
        + [hits(share, link, policy) for policy in policies]
        for link in result.setup["gb_per_s"]
        for share in result.setup["shares"]
    ]
    data = result.data
    said = (
        f"n = {data['prompts']:,} prompts over {result.setup['nodes']} nodes, {data['blocks']:,} "
        f"blocks, of which an endless cache has {100 * data['endless_hit_rate']:.0f} %; goal: "
        f"{data['goal']} with memory for all."
    )
    head = ["stores together hold", "links", *(f"`{policy}`" for policy in policies)]
    return "\n\n".join([sources("prefix_nodes"), said, table(head, rows)])


def nodes() -> str:
    result = cited("nodes")
    found = result.data
    kinds = {"cut": "a worker's node", "head_cut": "the head's node"}

    def row(what: str, key: str, unit: str = "") -> list[str]:
        values = [found[f"{kind}_{key}"] for kind in kinds]
        return [
            what,
            *(
                spread_of_all(each["all"], unit) if isinstance(each, dict) else str(each)
                for each in values
            ),
        ]

    rows = [
        row("requests", "requests"),
        row("requests that failed", "failed_requests"),
        row("streams lost", "lost_streams"),
        row("wrong answers", "wrong_answers"),
        row("longest pause of a stream", "pause_s", "s"),
        row("from its start until its gateway and engine answer", "back_after_s", "s"),
    ]
    said = (
        f"A node loses its power for {result.setup['away_s']:g} s; a request each "
        f"{result.setup['every_s']:g} s; n = {result.setup['runs']} of each kind."
    )
    head = ["", *(f"lost: {each}" for each in kinds.values())]
    return "\n\n".join([sources("nodes"), said, table(head, rows)])


def store(result: Result) -> str:
    data = result.data
    rows = [
        [
            "blocks from the arena into an engine's memory, checksums verified",
            spread(data["spread"]["get_gbps"], "GB/s"),
            f"{spread(data['get_over_memcpy'])} of plain copies of the same pieces; goal 0.7",
        ],
        [
            "blocks from an engine into the arena, sealed and committed",
            spread(data["spread"]["put_gbps"], "GB/s"),
            f"{spread(data['put_over_memcpy'])} of the same",
        ],
        [
            "blocks from SSD",
            spread(data["spread"]["ssd_get_gbps"], "GB/s"),
            f"{spread(data['ssd_get_over_raw'])} of sequential `O_DIRECT` reads by "
            f"{data['ssd_threads']} threads",
        ],
        *(
            [
                f"a lookup, p50 of {data['lookup_us_n']:,} a run, by the blocks that it finds and "
                f"leases: {int(blocks):,}",
                spread(of, "µs"),
                "",
            ]
            for blocks, of in data["lookup_us_p50"].items()
        ),
        *(
            [
                f"share of a {way} that the forward pass hides, of one sweep of prompts",
                f"{number(of['median'])}, the least {number(of['min'])}",
                "",
            ]
            for way, of in data["hidden_share"].items()
        ),
    ]
    return f"{counted_runs(data['runs'])}.\n\n{table(['what', 'measured', 'against'], rows)}"


def spread_of_all(values: Sequence[float], unit: str) -> str:
    middle = statistics.median(values)
    return spread({"median": middle, "min": min(values), "max": max(values)}, unit)


def lending_at_rest() -> str:
    names = ("elastic_lending_off", "elastic_lending")
    without, with_it = (cited(name).data for name in names)
    runs = cited(names[1]).setup["runs"]

    def row(what: str, key: str, unit: str, digits: int = 2) -> list[str]:
        return [what, *(spread(each[key], unit, digits) for each in (without, with_it))]

    rows = [
        row(f"first token of an unloaded model (n = {runs})", "first_token_unloaded_s", "s", 3),
        row(f"of a sleeping one (n = {runs})", "first_token_asleep_s", "s", 3),
        row("memory of a further sleeping model (n = 2)", "sleeping_model_mb", "MB", 4),
    ]
    return f"{sources(*names)}\n\n{table(['', 'may not lend', 'may'], rows)}"


def inline(name: str, *path: str, unit: str, digits: int = 2) -> Callable[[], str]:
    """A figure within a sentence: a median, or a number."""

    def text() -> str:
        found = cited(name).figure(*path)
        return f"{number(found['median'] if isinstance(found, dict) else found, digits)} {unit}"

    return text


def elastic_source() -> str:
    result = cited("elastic")
    return f"{result.day}, commit {result.commit}, n = {result.setup['runs']}"


def day() -> str:
    result = cited("day")
    data, alerts = result.data, result.data["alerts"]
    rows = [
        ["minutes", f"{data['minutes']:g}"],
        ["requests", str(data["requests"])],
        ["requests that failed", str(data["failed_requests"])],
        ["answers that differ", str(data["different_answers"])],
        ["alerts watched", str(alerts["rules"])],
        ["alerts that fired", str(len(alerts["fired"]))],
        ["of them falsely", str(alerts["false_alarms"])],
        [
            "alerts that were pending and did not fire",
            ", ".join(f"`{name}`" for name in alerts["pending_but_not_fired"]) or "none",
        ],
    ]
    return "\n\n".join([sources("day"), table(["a day in float32", "one run"], rows)])


TEXTS: Mapping[str, Callable[[], str]] = {
    "decisions": decisions,
    "elastic": elastic,
    "scaling": scaling,
    "nodes": nodes,
    "day": day,
    "prefix-nodes": prefix_nodes,
    "lending-at-rest": lending_at_rest,
    "store": tables_of_arms.of_file("store", store),
    "unloaded": inline("elastic", "first_token_unloaded_s", unit="s"),
    "asleep": inline("elastic", "first_token_asleep_s", unit="s"),
    "vllm-start": inline("elastic", "vllm_server_start_s", unit="s"),
    "elastic-source": elastic_source,
    "two-ready": inline("start", "two_engines_ready_s", unit="s"),
    "two-servers-ready": inline("start", "two_vllm_servers_start_s", unit="s"),
    "engine-back": inline("start", "engine_back_s", unit="s"),
    "same-while-lenders-die": tables_of_mechanisms.same_while_lenders_die,
    "moves-pause": tables_of_mechanisms.longest_pauses,
    "overhead-memory": inline("overhead", "comparisons", "loomserve", "memory_gib", unit="GiB"),
    "overhead-bare-memory": inline("overhead", "comparisons", "noise", "memory_gib", unit="GiB"),
    **{
        f"separated-{name}": tables_of_mechanisms.separated_over_unified(*of)
        for name, of in (
            ("gap", ("azure_llm_2023_conv", "itl_p99_ratio")),
            ("first", ("azure_llm_2023_conv", "ttft_p50_ratio")),
            ("code-first", ("azure_llm_2023_code", "ttft_p50_ratio")),
        )
    },
    "pause": tables_of_mechanisms.pause_of("kill_at_10, 8 streams, context 0"),
    "pause-context": tables_of_mechanisms.pause_of("kill_at_10, 8 streams, context 1000"),
    **tables_of_arms.TEXTS,
    **tables_of_gpus.TEXTS,
    **{
        name: tables_of_arms.of_file(name, made)
        for name, made in tables_of_mechanisms.TABLES.items()
    },
}
"""By the name in a marker."""
