"""What does separating prefill from decode gain, and what does it cost?

How, and what was found: ``benchmarks/disaggregation.md``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.harness import (
    NotMeasuredError,
    in_turns,
    medians,
    parser_of,
    percentiles,
    ratios,
    run,
    spread,
)
from benchmarks.load import Outcome, send_in_streams, send_when_due
from benchmarks.platforms import Platform, configuration, served
from benchmarks.servers import running
from benchmarks.workload import (
    AZURE_LIKE,
    BLOCK_TOKENS,
    OUTPUT_SCALE,
    PROMPT_SCALE,
    Arrival,
    PrefixRequest,
    azure,
    azure_like,
    scaled_down,
    window,
)
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog

FIRST_PORT = 18700
MODEL = "chat"
CONTEXT = 2048
SEPARATED, UNIFIED = "separated", "unified"
LOCAL_TOKENS = BLOCK_TOKENS
"""Shorter prompts have no whole block, so the decode replica computes them."""
ROLES: dict[str, dict[str, int] | None] = {
    SEPARATED: {"prefill": 1, "decode": 1, "local_prompt_tokens": LOCAL_TOKENS},
    UNIFIED: None,
}
"""Of each arm."""
LOAD = 0.6
"""Of what the unified arm serves when all requests come at once."""
BURST = 24
"""Requests that measure this."""
PROBE_LENGTHS = (64, 256, 1024)
PROBE_TOKENS = 16
PROBES = 5
"""Of each length, one after the other."""
HANDED_OVER = 0.9
"""Share of the longer ones below which the separated arm was not separated."""
GENERATED = 5000
RATIOS = {
    "ttft_p50_ratio": "ttft_ms_p50",
    "ttft_p99_ratio": "ttft_ms_p99",
    "tpot_p50_ratio": "tpot_ms_p50",
    "tpot_p99_ratio": "tpot_ms_p99",
    "itl_p99_ratio": "itl_ms_p99",
    "goodput_ratio": "goodput",
}
"""Separated over unified, and of which figure."""


@dataclass(frozen=True)
class Slo:
    """The longest TTFT for some lengths of prompt, with straight lines between them, and TPOT."""

    lengths: tuple[int, ...]
    ttft_s: tuple[float, ...]
    tpot_s: float

    @classmethod
    def over(cls, idle: Sequence[Outcome], ttft_times: float, tpot_times: float) -> Slo:
        """Multiples of the medians of an idle server's answers."""
        lengths = tuple(sorted({one.prompt_tokens for one in idle}))
        return cls(
            lengths,
            tuple(
                ttft_times
                * statistics.median(one.ttft for one in idle if one.prompt_tokens == length)
                for length in lengths
            ),
            tpot_times * statistics.median(one.tpot for one in idle),
        )

    def met(self, answer: Outcome) -> bool:
        longest = np.interp(answer.prompt_tokens, self.lengths, self.ttft_s)
        return bool(answer.ttft <= longest and answer.tpot <= self.tpot_s)


def configured(arm: str, model: str, port: int) -> dict[str, Any]:
    engine = {
        "max_model_len": CONTEXT,
        "max_num_batched_tokens": CONTEXT,
        "max_num_seqs": 32,
        "block_size": BLOCK_TOKENS,
        "enforce_eager": True,
        "dtype": cpu_dtype(),
    }
    roles = ROLES[arm]
    more = {"router": {"policy": "load_aware"}, **({"roles": roles} if roles else {})}
    of = served(MODEL, model, "512MiB", engine, **more)
    return configuration(port, of, kvstore={"memory": "1GiB"})


class ServedArm:
    """An arm's platform, which is frozen but while it is asked."""

    def __init__(self, name: str, model: str, port: int, folder: Path) -> None:
        self.name = name
        self._platform = Platform(configured(name, model, port), folder, name)
        self.arm = self._platform.arm(MODEL)

    def answers(
        self, requests: Sequence[PrefixRequest], seed: str, *, one_by_one: bool = False
    ) -> list[Outcome]:
        """To all requests, each sent when it is due, or when the one before has ended.

        Raises:
            NotMeasuredError: a request failed, or too few were handed from prefill to decode.
        """
        asked = [one.asked(MODEL, seed) for one in requests]
        urls = [self._platform.url]
        self.arm.thaw()
        before = self._handed_over()
        outcomes = uvloop.run(
            send_in_streams(urls, asked, 1) if one_by_one else send_when_due(urls, asked)
        )
        self.arm.answered(outcomes)
        if ROLES[self.name]:
            time.sleep(2.5)  # replicas report their metrics every two seconds
            handed = self._handed_over() - before
            longer = sum(request.tokens > LOCAL_TOKENS for request in requests)
            if handed < HANDED_OVER * longer:
                raise NotMeasuredError(
                    f"{handed:.0f} of {longer} requests were handed from prefill to decode\n"
                    + self.arm.servers[0].tail()
                )
        self.arm.freeze()
        return outcomes

    def _handed_over(self) -> float:
        """Requests that decode replicas have continued so far."""
        return self._platform.metrics("loomserve_handoffs_total", "outcome").get("continued", 0.0)


def probes() -> list[PrefixRequest]:
    """``PROBES`` rounds of all lengths, to be sent one by one."""
    arrivals = [
        Arrival(float(number), length, PROBE_TOKENS)
        for number, length in enumerate(PROBE_LENGTHS * PROBES)
    ]
    return window(arrivals, requests=len(arrivals), rate=1.0, seed="probes")


def handoff_ms(answer: Outcome) -> float:
    """How much longer the second token took than those after it."""
    first, *later = answer.gaps
    return 1000 * (first - statistics.median(later))


def handoffs(answers: Sequence[Outcome]) -> dict[str, Any]:
    """Medians of the rounds of :func:`probes`, and of each length of prompt."""
    size = len(PROBE_LENGTHS)
    rounds = [answers[at : at + size] for at in range(0, len(answers), size)]
    return {
        "handoff_ms": spread(statistics.median(map(handoff_ms, one)) for one in rounds),
        "handoff_ms_by_prompt": {
            str(length): statistics.median(
                handoff_ms(one) for one in answers if one.prompt_tokens == length
            )
            for length in PROBE_LENGTHS
        },
    }


def traces(paths: Sequence[Path]) -> dict[str, list[Arrival]]:
    """The files' requests, or generated ones, scaled to this context."""
    whole = {path.name: azure(path) for path in paths} or {
        f"generated {kind}": azure_like(kind, requests=GENERATED, seed="trace")
        for kind in AZURE_LIKE
    }
    found = {name: scaled_down(arrivals, CONTEXT) for name, arrivals in whole.items()}
    for name, arrivals in found.items():
        left_out = len(whole[name]) - len(arrivals)
        print(f"{name}: {left_out} of {len(whole[name])} requests exceed {CONTEXT} tokens")
    return found


def rate_for(arrivals: Sequence[Arrival], unified: ServedArm, name: str) -> float:
    """``LOAD`` of the requests a second that the unified arm serves of this trace."""
    # From all over the trace, since single stretches of it are longer or shorter than its mean.
    burst = window(arrivals[:: len(arrivals) // BURST], requests=BURST, rate=1e6, seed="burst")
    return LOAD * BURST / duration_s(unified.answers(burst, f"{name}/burst"))


def duration_s(answers: Sequence[Outcome]) -> float:
    """From the first request's arrival to the last token."""
    return max(one.times[-1] for one in answers) - min(one.due for one in answers)


def compare(
    name: str,
    arrivals: Sequence[Arrival],
    arms: Mapping[str, ServedArm],
    slo: Slo,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Run by run, the same part of a trace on both arms; the trace's part of the result."""
    rate = options.rate or rate_for(arrivals, arms[UNIFIED], name)
    requests = round(rate * options.seconds)
    own = (len(arrivals) - 1) / (arrivals[-1].at_s - arrivals[0].at_s)
    print(f"{name}: {requests} requests a run, {rate:.2f} a second, the trace's {own:.2f}")

    def measure(arm: str, number: int) -> dict[str, Any]:
        chosen = window(arrivals, requests=requests, rate=rate, seed=f"run {number}")
        return figures(arms[arm].answers(chosen, f"{name}/{number}"), slo)

    runs = in_turns(list(arms), options.runs, measure, f"{name}, ")
    return {"rate": rate, "requests": requests, "trace_rate": own, **comparison(runs, requests)}


def figures(answers: Sequence[Outcome], slo: Slo) -> dict[str, Any]:
    """Latencies in ms; ``goodput`` as a share of the requests."""
    met = sum(map(slo.met, answers))
    return {
        **percentiles("ttft_ms", [1000 * one.ttft for one in answers]),
        **percentiles("tpot_ms", [1000 * one.tpot for one in answers]),
        **percentiles("itl_ms", [1000 * gap for one in answers for gap in one.gaps]),
        "goodput": met / len(answers),
    }


def comparison(runs: Sequence[dict[str, dict[str, Any]]], requests: int) -> dict[str, Any]:
    """Separated over unified, run by run; then their medians and extremes."""
    # Where no unified request meets the SLO, as if a single one did: there is no ratio to 0.
    found = {
        ratio: ratios(
            [one[SEPARATED][name] for one in runs],
            [one[UNIFIED][name] or 1 / requests for one in runs],
        )
        for ratio, name in RATIOS.items()
    }
    return {**medians(found), "by_run": runs}


def measured(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    loads = traces(options.trace)
    model = str(catalog.resolve("demo", Path.cwd()))
    arms = {
        name: ServedArm(name, model, FIRST_PORT + 10 * number, folder)
        for number, name in enumerate(ROLES)
    }
    with running([one.arm for one in arms.values()], options.start_timeout, bind=False):
        for one in arms.values():
            one.answers(probes()[: len(PROBE_LENGTHS)], "warm-up", one_by_one=True)
        alone = {
            name: one.answers(probes(), "probes", one_by_one=True) for name, one in arms.items()
        }
        slo = Slo.over(alone[UNIFIED], options.slo_ttft, options.slo_tpot)
        print(f"{slo}", flush=True)
        found = {name: compare(name, of, arms, slo, options) for name, of in loads.items()}
    return {
        "traces": found,
        **handoffs(alone[SEPARATED]),
        "slo": asdict(slo),
        "runs": options.runs,
    }


def main() -> int:
    parser = parser_of("disaggregation", __doc__)
    parser.add_argument("--trace", type=Path, nargs="+", default=[], help="Azure traces, .csv.gz")
    parser.add_argument("--runs", type=int, default=5, help="pairs a trace")
    parser.add_argument("--seconds", type=float, default=30, help="of arrivals, a run and arm")
    parser.add_argument("--rate", type=float, help="requests a second, in place of the measured")
    parser.add_argument("--slo-ttft", type=float, default=5, help="times the idle one")
    parser.add_argument("--slo-tpot", type=float, default=3, help="times the idle one")
    parser.add_argument("--start-timeout", type=float, default=600)
    options = parser.parse_args()
    return run(
        "disaggregation",
        options,
        measured,
        without=("start_timeout",),
        load=None if options.rate else LOAD,
        prompt_scale=PROMPT_SCALE,
        output_scale=OUTPUT_SCALE,
        context=CONTEXT,
        local_prompt_tokens=LOCAL_TOKENS,
        block_tokens=BLOCK_TOKENS,
    )


if __name__ == "__main__":
    sys.exit(main())
