"""How much of the KV store's transfers hides behind the forward pass, and is it as predicted?

BanaServe, section 4.3.3: of a prompt of L tokens a share h comes from the store (its hit rate, the
paper's r), and the rest, r = 1 - h here, is computed and saved. With N layers, T_F seconds for the
whole prompt, S bytes of KV a token and layer and B bytes a second, a layer computes for T_F * r /
N, while the next one loads for S * L * h / B and the last one is saved for S * L * r / B. A
transfer that takes x times a layer's computation is hidden as long as x <= 1, else 1 / x of it is.
Beside the paper's prediction stands one by stages ("stages"): a layer computes for as long as it
did with shared memory, since what is computed also attends to what was loaded, and a save has the
longer of computation and load to hide behind. It also knows the two ends of this pipeline, where
nothing of another layer hides a transfer: before the first layer's attention, and after the last
one's, when as many layers are left as are saved at once.

A real engine takes prompts of each length and share, first from shared memory. As that is far from
the border on a CPU, it then reaches the store through links of given bandwidths: each piece's copy
lasts as long as the link would take, and the core is free meanwhile. T_F is measured with nothing
in the store, B of shared memory without an engine. A layer's transfer is hidden as far as the
forward pass did not wait for it. Beside that stands how much longer the step took than with the
prefix in the engine's own cache ("added_s").

``--plot FILE`` draws all points. The last line of the output is one JSON object, also written to
``benchmarks/results``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import BLOCK_TOKENS, offline_engine, running_store
from benchmarks.report import Spread
from benchmarks.result_files import machine, publish, said_by
from benchmarks.store import LAYER_BYTES, LAYERS, memory_run
from loomserve.kvstore.engine.transfers.memory import BlockPieces, KvMemory
from loomserve.kvstore.engine.transfers.saver import WORTH_A_WAKE
from loomserve.kvstore.engine.transfers.transfer_time import Copied, TransferTime
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.models import catalog

LENGTHS = (256, 512, 1024, 2048)
HIT_SHARES = (0.25, 0.5, 0.75, 0.9)
LINK_LENGTH = 512
LINK_HIT_SHARES = (0.5, 0.9)
LINKS_MBPS = (8, 16, 32, 64, 128, 256)
OWN_STEPS = 3
"""With the engine's own prefix cache; their median counts."""
WAYS = ("load", "save")
AT_ONCE_S = 0.0005
"""Between two pieces of one transfer there is at most a checksum of a few."""
BEFORE_ATTENTION = 0.25
"""Share of a layer's computation that comes before its attention, which waits for what is loaded;
what comes after it, most of its weights, hides the save of a layer's keys and values."""
COMMITTED_S = 0.2
"""After a step, until its last blocks are found."""


@dataclass(frozen=True)
class Step:
    """One prompt's only step, in seconds, and what its transfers took."""

    seconds: float
    transfers: Mapping[str, TransferTime]


class Link:
    """An engine's memory at the far end of a link of ``bytes_per_s`` each way."""

    def __init__(self, memory: KvMemory, bytes_per_s: float) -> None:
        self._memory = memory
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._woken = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)

    def from_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        begin = time.perf_counter()
        self._memory.from_host(layer, runs)
        self._carry(sum(run.pieces.nbytes for run in runs), begin)

    def to_host(self, layer: int, runs: Sequence[BlockPieces]) -> None:
        begin = time.perf_counter()
        self._memory.to_host(layer, runs)
        self._carry(sum(run.pieces.nbytes for run in runs), begin)

    def _carry(self, size: int, begin: float) -> None:
        # Sleeps last longer than asked for: the next piece makes up for it, if it comes at once.
        at_once = begin - self._woken < AT_ONCE_S
        self._free_at = (self._free_at if at_once else begin) + size / self._bytes_per_s
        time.sleep(max(0.0, self._free_at - time.perf_counter()))
        self._woken = time.perf_counter()


class Engine:
    """A real engine with the store, and prompts that the store has a part of."""

    def __init__(self, store_options: StoreOptions) -> None:
        # For the functions that travel to the worker.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
        self._llm = offline_engine(
            str(catalog.resolve("demo", Path.cwd())),
            store_options.kv_transfer_config("demo"),
            # What LAYER_BYTES is of; by itself an engine computes in what this CPU is fit for.
            dtype="float32",
            max_model_len=max(LENGTHS) + BLOCK_TOKENS,
            max_num_seqs=4,
            max_num_batched_tokens=max(LENGTHS) + BLOCK_TOKENS,
            kv_cache_memory_bytes=512 * 2**20,
        )
        self._random = np.random.default_rng()

    def tokens(self, count: int) -> list[int]:
        """Some that no prompt had before."""
        return list(self._random.integers(1000, 40000, count).tolist())

    def forget(self) -> None:
        """Empty the engine's own prefix cache."""
        self._llm.reset_prefix_cache()

    def reach_store_at(self, bytes_per_s: float | None) -> None:
        self._llm.collective_rpc(put_link, args=(bytes_per_s,))

    def step(self, prompt: Sequence[int]) -> Step:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        before = self._llm.collective_rpc(transfer_times)[0]
        begin = time.perf_counter()
        self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(prompt))],
            SamplingParams(temperature=0, max_tokens=1),
            use_tqdm=False,
        )
        seconds = time.perf_counter() - begin
        time.sleep(COMMITTED_S)
        after = self._llm.collective_rpc(transfer_times)[0]
        transfers = {
            way: TransferTime(Copied(new[0] - old[0], new[1] - old[1]), new[2] - old[2])
            for way, new, old in zip(WAYS, after, before, strict=True)
        }
        return Step(seconds, transfers)


def transfer_times(worker: Any) -> list[tuple[int, float, float]]:
    """Runs in the engine's worker; of loads in steps and of saves: bytes, seconds, and those that
    the forward pass waited."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    loader, _, saver = get_kv_transfer_group().connector_worker.threads
    return [(*thread.time.copied, thread.time.waited_s) for thread in (loader, saver)]


def put_link(worker: Any, bytes_per_s: float | None) -> None:
    """Runs in the engine's worker: a link between it and the store; None takes it away."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    worker_half = get_kv_transfer_group().connector_worker
    for thread in worker_half.threads:
        memory = worker_half.memory
        thread.memory = memory if bytes_per_s is None else Link(memory, bytes_per_s)


def hit_tokens(length: int, share: float) -> int:
    """Whole blocks."""
    return int(length * share) // BLOCK_TOKENS * BLOCK_TOKENS


def point(engine: Engine, base: Sequence[int], share: float, link: float | None) -> dict[str, Any]:
    """A prompt of which the store has ``share``: the beginning of ``base``, which it has."""
    hit = hit_tokens(len(base), share)
    engine.forget()
    step = engine.step([*base[:hit], *engine.tokens(len(base) - hit)])
    blocks = {"load": hit // BLOCK_TOKENS, "save": (len(base) - hit) // BLOCK_TOKENS}
    for way, count in blocks.items():
        if step.transfers[way].copied.size != count * LAYERS * LAYER_BYTES:
            raise RuntimeError(f"the step did not {way} {count} blocks")
    return {
        "length": len(base),
        "hit_tokens": hit,
        "link_mbps": None if link is None else link / 1e6,
        "step_s": step.seconds,
        **{
            f"{way}_{what}": value
            for way, time_ in step.transfers.items()
            for what, value in (
                ("ms", 1e3 * time_.copied.busy_s),
                ("waited_ms", 1e3 * time_.waited_s),
                ("hidden_share", time_.hidden_share),
            )
        },
    }


def sweep_run(engine: Engine) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """T_F by length, and a point for each length and share, at the speed of shared memory."""
    whole: dict[int, float] = {}
    points = []
    for length in LENGTHS:
        base = engine.tokens(length)
        engine.forget()
        whole[length] = engine.step(base).seconds
        points += [point(engine, base, share, None) for share in HIT_SHARES]
    return whole, points


def link_run(engine: Engine) -> list[dict[str, Any]]:
    """A point for each link and share; ``added_s`` against the engine's own prefix cache."""
    base = engine.tokens(LINK_LENGTH)
    points = []
    for share in LINK_HIT_SHARES:
        engine.step(base)
        hit = hit_tokens(LINK_LENGTH, share)
        # Nothing is loaded and the saves are not waited for, as shared memory is fast.
        own = statistics.median(
            engine.step([*base[:hit], *engine.tokens(LINK_LENGTH - hit)]).seconds
            for _ in range(OWN_STEPS)
        )
        for link in (None, *(1e6 * mbps for mbps in LINKS_MBPS)):
            engine.reach_store_at(link)
            one = point(engine, base, share, link)
            points.append({**one, "added_s": one["step_s"] - own})
        engine.reach_store_at(None)
    return points


def predict(
    points: Sequence[dict[str, Any]],
    whole_s: Mapping[int, float],
    memory_bps: Mapping[str, float],
) -> None:
    """Put the times of a layer and the hidden shares of both predictions beside what was measured.

    ``points`` are of both speeds, ``whole_s`` is T_F by length.
    """
    computed_s = {
        (one["length"], one["hit_tokens"]): one["step_s"] / LAYERS
        for one in points
        if one["link_mbps"] is None
    }
    for one in points:
        length, hit, link = one["length"], one["hit_tokens"], one["link_mbps"]
        load_s, save_s = (
            LAYER_BYTES / BLOCK_TOKENS * tokens / (1e6 * link if link else memory_bps[way])
            for way, tokens in (("load", hit), ("save", length - hit))
        )
        paper_s = whole_s[length] * (length - hit) / length / LAYERS
        stage_s = computed_s[length, hit]
        saved_bytes = (length - hit) // BLOCK_TOKENS * LAYER_BYTES
        by_stages = {
            "load": hidden(load_s, stage_s, 1, BEFORE_ATTENTION * stage_s),
            "save": hidden(
                *(save_s, max(stage_s, load_s)),
                min(LAYERS, max(1, WORTH_A_WAKE // saved_bytes)),
                (1 - BEFORE_ATTENTION) * stage_s,
            ),
        }
        one["model"] = {
            "load_layer_ms": 1e3 * load_s,
            "save_layer_ms": 1e3 * save_s,
            "paper_layer_ms": 1e3 * paper_s,
            "stages_layer_ms": 1e3 * stage_s,
            "load_over_stage": load_s / stage_s,
            "save_over_stage": save_s / max(stage_s, load_s),
            "load_hidden_share": {
                "paper": min(1.0, paper_s / load_s),
                "stages": by_stages["load"],
            },
            "save_hidden_share": {
                "paper": min(1.0, paper_s / save_s),
                "stages": by_stages["save"],
            },
        }


def hidden(transfer_s: float, stage_s: float, together: int, end_s: float) -> float:
    """Share of all layers' transfers that hides, where each layer's may last ``stage_s``.

    Args:
        transfer_s: of a layer.
        together: layers at one end of the forward pass that have no other's stage to hide behind.
        end_s: what of their own layer's computation they have.
    """
    late_s = together * transfer_s + (LAYERS - together) * max(0.0, transfer_s - stage_s)
    return 1 - max(0.0, late_s - end_s) / (LAYERS * transfer_s)


def errors(points: Sequence[Mapping[str, Any]], kind: str) -> dict[str, float]:
    """How far the measured shares are from one of the predictions."""
    off = [
        abs(one[f"{way}_hidden_share"] - one["model"][f"{way}_hidden_share"][kind])
        for one in points
        for way in WAYS
    ]
    return {"median": statistics.median(off), "max": max(off)}


def medians(runs: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The same point of all runs in one; spreads of what is compared with the model."""
    joined = []
    for same in zip(*runs, strict=True):
        one = {
            what: value if value is None else statistics.median(run[what] for run in same)
            for what, value in same[0].items()
        }
        one["spread"] = {
            f"{way}_hidden_share": asdict(Spread.of([run[f"{way}_hidden_share"] for run in same]))
            for way in WAYS
        }
        joined.append(one)
    return joined


def hidden_share(points: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Of loads and of saves, over all points."""
    shares = {way: [point[f"{way}_hidden_share"] for point in points] for way in WAYS}
    return {way: {"median": statistics.median(of), "min": min(of)} for way, of in shares.items()}


def measured_hidden_share(store_options: StoreOptions) -> dict[str, dict[str, float]]:
    """In one sweep of a real engine."""
    engine = Engine(store_options)
    engine.step(engine.tokens(LINK_LENGTH))
    _, points = sweep_run(engine)
    return hidden_share(points)


def benchmark(store_options: StoreOptions, runs: int) -> dict[str, Any]:
    memory = [memory_run(store_options, run) for run in range(runs)]
    memory_bps = {
        way: 1e9 * statistics.median(run[f"{what}_gbps"] for run in memory)
        for way, what in (("load", "get"), ("save", "put"))
    }
    engine = Engine(store_options)
    engine.step(engine.tokens(LINK_LENGTH))
    sweeps, links = [], []
    for _ in range(runs):
        sweeps.append(sweep_run(engine))
        links.append(link_run(engine))
    whole = {length: Spread.of([times[length] for times, _ in sweeps]) for length in LENGTHS}
    points = {"memory": medians([of for _, of in sweeps]), "links": medians(links)}
    for of in points.values():
        predict(of, {length: spread.median for length, spread in whole.items()}, memory_bps)
    return {
        "hidden_share": hidden_share(points["memory"]),
        "prediction_error": {
            kind: {speed: errors(of, kind) for speed, of in points.items()}
            for kind in ("paper", "stages")
        },
        "runs": runs,
        "layers": LAYERS,
        "memory_gbps": {way: speed / 1e9 for way, speed in memory_bps.items()},
        "whole_prompt_s": {str(length): asdict(of) for length, of in whole.items()},
        **points,
    }


def table(points: Sequence[Mapping[str, Any]]) -> str:
    """Milliseconds a layer as measured and (predicted by the paper), then the hidden shares as
    measured, (predicted by the paper, by stages)."""
    lines = [
        f"{'tokens':>6}{'loaded':>8}{'MB/s':>8}{'step':>20}{'load':>18}{'hidden':>22}"
        f"{'save':>18}{'hidden':>22}"
    ]
    for one in points:
        model, link = one["model"], one["link_mbps"]
        line = f"{one['length']:6d}{one['hit_tokens']:8d}"
        line += f"{'memory' if link is None else f'{link:.0f}':>8}"
        line += f"{1e3 * one['step_s'] / LAYERS:10.2f} ({model['paper_layer_ms']:7.2f})"
        for way in WAYS:
            share = model[f"{way}_hidden_share"]
            line += f"{one[f'{way}_ms'] / LAYERS:9.3f}"
            line += f" ({model[f'{way}_layer_ms']:6.3f})"
            line += f"{one[f'{way}_hidden_share']:8.3f}"
            line += f" ({share['paper']:.3f}, {share['stages']:.3f})"
        lines.append(line)
    return "\n".join(lines)


def plot(figures: Mapping[str, Any], file: Path) -> None:
    import matplotlib as mpl

    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "transfer"
    mpl.use("svg")
    from matplotlib import pyplot

    figure, (margin, border) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    draw_margin(margin, figures["memory"])
    draw_border(border, [*figures["memory"], *figures["links"]])
    figure.savefig(file, metadata={"Date": None})


def draw_margin(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """A layer's computation and transfers by the length of the prompt."""
    for number, share in enumerate(HIT_SHARES):
        some = [one for one in points if one["hit_tokens"] == hit_tokens(one["length"], share)]
        lengths = [one["length"] for one in some]
        color = f"C{number}"
        axes.plot(lengths, [1e3 * one["step_s"] / LAYERS for one in some], "s-", color=color,
                  label=f"{share:.0%} loaded")  # fmt: skip
        axes.plot(lengths, [one["model"]["paper_layer_ms"] for one in some], ":", color=color)
        for way, marker in zip(WAYS, "ov", strict=True):
            axes.plot(lengths, [one[f"{way}_ms"] / LAYERS for one in some], marker,
                      color=color, fillstyle="none")  # fmt: skip
            axes.plot(lengths, [one["model"][f"{way}_layer_ms"] for one in some], ":", color=color)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="prompt tokens",
        ylabel="ms a layer",
        title="computation ■, load ○ and save ▽ through shared memory",
    )
    axes.set_xticks(LENGTHS, [str(length) for length in LENGTHS], minor=False)
    axes.minorticks_off()
    axes.plot([], [], ":", color="gray", label="model")
    axes.legend(fontsize="small")


def draw_border(axes: Any, points: Sequence[Mapping[str, Any]]) -> None:
    """Hidden shares by how long a transfer lasts beside what it has to hide behind."""
    for way, marker in zip(WAYS, "ov", strict=True):
        shares = [one[f"{way}_hidden_share"] for one in points]
        spreads = [one["spread"][f"{way}_hidden_share"] for one in points]
        low = [share - spread["min"] for share, spread in zip(shares, spreads, strict=True)]
        high = [spread["max"] - share for share, spread in zip(shares, spreads, strict=True)]
        ratios = [one["model"][f"{way}_over_stage"] for one in points]
        axes.errorbar(ratios, shares, (low, high), fmt=marker, fillstyle="none", label=way)
    x = np.geomspace(1e-4, 1e2, 500)
    axes.plot(x, np.minimum(1, 1 / x), "k:", label="model: min(1, 1 / x)")
    axes.axvline(1, color="lightgray", zorder=0)
    axes.set(
        xscale="log",
        ylim=(0, 1.05),
        xlabel="x = transfer of a layer / what it hides behind, predicted",
        ylabel="share hidden",
        title=f"through shared memory and links of {LINKS_MBPS[0]} to {LINKS_MBPS[-1]} MB/s",
    )
    axes.legend(fontsize="small")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the points (SVG)")
    options = parser.parse_args()
    facts = machine()
    with (
        tempfile.TemporaryDirectory() as folder,
        running_store(Path(folder)) as store_options,
    ):
        figures = benchmark(store_options, options.runs)
    print(table(figures["memory"]), table(figures["links"]), sep="\n\n")
    if options.plot:
        plot(figures, options.plot)
    publish("transfer", figures, setup=said_by(options, "plot"), facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
