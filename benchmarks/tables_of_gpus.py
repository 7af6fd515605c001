"""Tables of the steps of ``make gpu-check``, as they ran on one GPU (:mod:`benchmarks.gpu`)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.report import Spread
from benchmarks.result_files import Result, cited
from benchmarks.table_text import number, spread, with_head


def source() -> str:
    """What all steps ran on."""
    result = cited("gpu")
    versions = ", ".join(f"{name} {of}" for name, of in result.machine["versions"].items())
    commits: dict[str, list[str]] = {}
    for step, of in result.data["steps"].items():
        commits.setdefault(of["commit"][:7], []).append(f"`{step}`")
    at = "; ".join(f"{', '.join(steps)} at {commit}" for commit, steps in commits.items())
    return (
        f"From `benchmarks/results/cited/gpu.json`: until {result.day}, {result.machine['cpu']}, "
        f"{versions}. Steps and commits: {at}."
    )


def kernels(result: Result) -> str:
    """A task's kernels beside torch's attention over contiguous KV, and beside memory's rate."""
    found = _found(result, "kernels")
    rate = found["ceiling: copy, GB/s"]

    def row(name: str, of: Mapping[str, Any]) -> list[str]:
        served, ceiling = _median(of, "post, serve"), of["ceilings, us"]["attention"]["median"]
        return [
            name,
            f"{number(_median(of, 'post'))} µs",
            f"{number(served, 3)} µs",
            f"{number(_median(of, 'post, serve, wait and fetch') - served)} µs",
            f"{number(ceiling, 3)} µs, {number(served / ceiling)}",
            number(of["bytes"]["kv"] / served / 1e3 / rate),
        ]

    sizes = {name: of for name, of in found.items() if isinstance(of, dict) and "us a task" in of}
    head = [
        *("a task", "post", "post and serve", "wait and fetch take more"),
        *("torch's attention, and the ratio", "KV read, of what memory copies"),
    ]
    error = max(max(of["errors"].values()) for of in sizes.values())
    said = (
        f"In graphs, medians of 20; memory copies {number(rate, 3)} GB/s. The greatest error of an "
        f"output is {number(error)}, in bfloat16."
    )
    return with_head(said, head, [row(*each) for each in sizes.items()])


def lend(result: Result) -> str:
    """Steps of both mini models in the four forms, and how long a task waits to be picked up."""
    found = _found(result, "lend")
    rows = []
    for name, of in found.items():
        if not isinstance(of, dict):
            continue
        context, _, what = name.partition(", ")
        lent, _, form = what.partition(" of 128 rows lent, ")
        if form:
            picked_up = spread(of["layers, us"]["until picked up"], "µs")
            kinds = {f"{lent} rows: {form}": ("hot step, ms", "cold step, ms", picked_up)}
        else:
            beside = ("hot step beside the cold model, ms", "cold step beside the hot model, ms")
            kinds = {
                "none, each alone": ("hot step alone, ms", "cold step alone, ms", ""),
                "none": (*beside, ""),
            }
        for kind, (hot, cold, until) in kinds.items():
            steps = (spread(of[each], "ms", 3) for each in (hot, cold))
            rows.append([context, kind, *steps, until])
    head = ["context", "lent of 128 rows", "hot step", "cold step", "until picked up"]
    return with_head("40 steps of the hot model each.", head, rows)


def store(result: Result) -> str:
    """Copies of one layer's blocks of 64 KiB to the device."""
    found = _found(result, "store")

    def row(name: str, of: Mapping[str, Any]) -> list[str]:
        ways = ("by index", "by block", "batched", "ceiling: to the device")
        both = (of[f"both ways, {streams}"]["GB/s"] for streams in ("one stream", "two streams"))
        rates = [number(of[way]["GB/s"]) for way in ways]
        return [name.split()[0], *rates, ", ".join(number(each) for each in both)]

    head = [
        *("blocks", "by index", "one by one", "in one call", "one contiguous copy"),
        "both ways, on one stream and on two",
    ]
    rows = [row(name, of) for name, of in found.items() if isinstance(of, dict)]
    return with_head("GB/s, medians of 20.", head, rows)


def serve(result: Result) -> str:
    """One engine of the platform's options beside vLLM's own, both eager."""
    found = _found(result, "serve")
    asleep, (to_sleep, to_wake) = found["sleep"], found["sleep"]["ms to sleep, to wake"]

    def equal(name: str) -> str:
        same, of = found[name]
        return f"{same} of {of}"

    both = (
        ("8 prompts of 1,024 tokens, nothing of them cached", "prefills", "prefills, saved"),
        ("the same, with 7,936 tokens' KV from the store", "", "prefills from the store"),
        ("8 answers of 64 tokens", "answers", "answers, from the store"),
    )
    rows = [
        [
            what,
            spread(found[f"vLLM's, ms of {theirs}"], "ms") if theirs else "",
            spread(found[f"ours, ms of {ours}"], "ms"),
        ]
        for what, theirs, ours in both
    ]
    said = (
        f"5 runs each. Sleep gave back {number(asleep['MiB given back'], 3)} MiB and took "
        f"{number(to_sleep)} ms, waking {number(to_wake)} ms; "
        f"{asleep['tokens equal after it, of'][0]} of {asleep['tokens equal after it, of'][1]} "
        "tokens were the same after it. Two runs of vLLM's own had "
        f"{equal(_TWICE)} tokens in common, ours with its first {equal(_OURS)}, and with KV from "
        f"the store {equal(_STORED)}."
    )
    return with_head(said, ["", "vLLM's own", "ours"], rows)


_TWICE = "tokens equal of two runs of vLLM's, of"
_OURS = "tokens equal to vLLM's, of"
_STORED = "tokens equal with KV from the store, of"


def flags(result: Result) -> str:
    """What a flag and a look cost, in a line each."""
    found, probe = _found(result, "flags"), _found(result, "probe")
    look, empty = (found["looks, us"][name] for name in ("look", "ceiling: empty kernel"))
    between = _found(result, "processes")

    def round_trip(where: str) -> str:
        return spread(found[f"round trip, us, flags {where}"], "µs")

    lines = (
        f"A flag's way to another stream and back: {round_trip('on the device')} on the device, "
        f"{round_trip('in pinned memory')} in the host's memory.",
        f"A look that finds nothing: {spread(look['in a graph'], 'µs', 3)} in a graph, where "
        f"an empty kernel takes {spread(empty['in a graph'], 'µs', 3)}; "
        f"{number(look['eager']['median'])} µs if Python queues it.",
        f"The clock ticks every {number(probe['clock_step_ns']['median'])} ns; a page of virtual "
        f"memory is {probe['page_bytes'] // 2**20} MiB; `/dev/shm` can be pinned; MPS is there.",
        "Between two processes with MPS, 32 rows of 1,024 tokens: a layer's post and wait take "
        f"{spread(between[_LAYER], 'µs', 3)}, with a greatest error of "
        f"{number(between['greatest error'])}.",
    )
    return "\n".join(f"* {line}" for line in lines)


def platform(result: Result) -> str:
    """The platform beside vLLM's own server, both on the one GPU."""
    found = _found(result, "platform")

    def row(streams: str, of: Mapping[str, list[Mapping[str, float]]]) -> list[str]:
        both = (
            ", ".join(
                number(statistics.median(one[name] for one in of[whose]), 3)
                for whose in ("vLLM", "Loomserve")
            )
            for name in ("TTFT p50, ms", "TPOT p50, ms", _RATE)
        )
        return [streams, *both, _ratio_of_rates(result, streams)]

    head = [
        *("streams", "first token, p50, ms", "further ones, p50, ms", "tokens a second"),
        "ratio of those",
    ]
    (runs,) = {len(of["vLLM"]) for of in found["streams"].values()}
    said = f"{runs} runs, in turns; vLLM's figure, then Loomserve's."
    return with_head(said, head, [row(*each) for each in found["streams"].items()])


_RATE = "tokens/s"


def _ratio_of_rates(result: Result, streams: str) -> str:
    of = _found(result, "platform")["streams"][streams]
    ours, theirs = ([run[_RATE] for run in of[whose]] for whose in ("Loomserve", "vLLM"))
    return spread(vars(Spread.of_ratios(ours, theirs)), digits=3)


def comes_and_goes(result: Result) -> str:
    """What the platform's models on a GPU did beside answering a load."""
    found = _found(result, "platform")
    goes, killed = found["comes and goes"], found["a killed engine"]
    loaded, asleep = (
        goes[f"MiB of the GPU {when}"] - goes["MiB of the GPU while it is unloaded"]
        for when in ("once it is loaded", "while it sleeps")
    )
    unloaded = [
        goes[f"seconds to the first piece, {when}"] for when in ("unloaded", "unloaded again")
    ]
    waking = goes["seconds to the first piece, asleep"]
    same, (of, _, until) = (
        killed["characters before the first other one"],
        killed["of characters, and until the kill"],
    )
    lines = (
        f"The demo model answered: {found['answers'][_REAL]!r}.",
        f"All were ready after {number(found['seconds until all models are ready'])} s, with "
        "vLLM's server starting beside them and nothing compiled before.",
        f"One that slept had its first piece after {number(1000 * waking)} ms; it took "
        f"{number(loaded, 3)} MiB of the GPU awake and {number(asleep, 3)} asleep.",
        f"One that was unloaded had it after {' and '.join(map(number, unloaded))} s.",
        f"A stream whose engine was killed after {until} characters waited "
        f"{number(killed['longest pause, s'])} s for the next one; {same} of its {of} characters "
        "were those of the undisturbed one.",
    )
    return "\n".join(f"* {line}" for line in lines)


_REAL = "the real model's"


def graphs(result: Result) -> str:
    """Engines that vLLM compiles for and captures graphs of."""
    found = _found(result, "graphs")
    ours, theirs = (spread(found[f"{whose}, ms of answers"], "ms") for whose in ("ours", "vLLM's"))
    same, of = found[_OURS]
    stored, of_stored = found[_STORED]
    return (
        f"8 answers of 64 tokens took {theirs} of vLLM's own and {ours} of ours, whose prompts of "
        f"8,192 tokens were saved meanwhile; {same} of {of} tokens were those of vLLM's own, and "
        f"{stored} of {of_stored} where the prompts came from the store."
    )


def engines(result: Result) -> str:
    """Two engines of which one lends to the other."""
    found = _found(result, "engines")

    def equal(what: str) -> str:
        same, of = found[f"tokens equal {what}, of"]
        return f"{same} of {of}"

    home, lent = found["seconds at home, lent"]
    _, away = found["seconds at home, with heads away"]
    return (
        f"{found['tasks']} tasks, all of which were served; a layer of them waited "
        f"{number(found['a wait, us'], 3)} µs. 16 answers of 64 tokens took {number(home)} s at "
        f"home, {number(lent)} s lent and {number(away)} s with half of the KV heads away; in the "
        "last two is the compilation of the kernels. As many tokens were those of a first run at "
        f"home: of a second {equal('at home')}, lent {equal('when lent')}, with heads away "
        f"{equal('with half of the heads away')}, with them at home again "
        f"{equal('with them at home again')}."
    )


_LAYER = "a layer's post and wait, us"


def _found(result: Result, step: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = result.figure("steps", step, "found")
    return found


def _median(of: Mapping[str, Any], name: str) -> float:
    return float(of["us a task"][name]["in a graph"]["median"])


def _of(made: Callable[[Result], str]) -> Callable[[], str]:
    return lambda: made(cited("gpu"))


_MADE = (comes_and_goes, engines, flags, graphs, kernels, lend, platform, store, serve)
TEXTS: Mapping[str, Callable[[], str]] = {
    "gpu-platform-32": _of(partial(_ratio_of_rates, streams="32")),
    "gpu-source": source,
    **{f"gpu-{made.__name__.replace('_', '-')}": _of(made) for made in _MADE},
}
