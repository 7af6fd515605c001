"""Do answers stay the same through a day of bursts, failures and moves?

The fleet of :mod:`benchmarks.popularity` under the controller's own rule (``auto``), for twenty
minutes by default: bursts of one model, of the other, and of both; the controller is killed, the
lender is killed in the middle of a burst and while it computes heads, an operator orders heads and
layers away and home again, and takes one order back while it is under way. Every stream's tokens
are compared with those of the same requests served before by the same engines while nothing was
lent or moved, all in float32, as rounding to bfloat16 may turn a token where the same sums are made
elsewhere. Any that differ, or any request that fails, fails the command; so does an operator's
order that was not carried out.

``--alerts`` has a Prometheus with ``dashboards/alerts.yaml`` watch the day, and tells which alerts
fired, and which of them no fault justifies; one of these fails the command, too. Most rules wait
for minutes, some for a quarter of an hour: a short day says little of those.

``--plot FILE`` draws the devices' loads over time, with what happened, and ``--dashboard FILE`` the
overview's panels as Prometheus has seen the day. The last line of the output
is one JSON object.

Run it as ``python -m benchmarks.day`` or ``make check-day``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.day_alerts import BURST, RULES, Fault, alarms, report
from benchmarks.engine import EXACT
from benchmarks.popularity import (
    DEVICES,
    NORTH,
    SOUTH,
    Answer,
    Fleet,
    Phase,
    arrivals,
    load,
    replay,
    serve,
)
from benchmarks.prometheus import Prometheus, scraping
from benchmarks.result_files import machine, publish, said_by
from dashboards.preview import Answers, draw
from dashboards.table import DASHBOARDS
from loomserve.platform.models import catalog

SEED = "day"
LAYERS_AWAY = 10
_SAMPLE_S = 2.0
_AT_ONCE = 8
_SCRAPE_S = 5.0


def phases(minutes: float, rate: float) -> list[Phase]:
    """Ten equal parts, the last of which is silent; the lender is idle in those in which it dies,
    for its own requests would die with it."""
    both = dict.fromkeys(DEVICES, rate)
    parts = [
        both,
        {**both, NORTH: 10 * rate},
        both,
        {**both, SOUTH: 10 * rate},
        both,
        {NORTH: 10 * rate},
        both,
        {NORTH: 5 * rate, SOUTH: 5 * rate},
        {NORTH: rate},
    ]
    return [Phase(6 * minutes, rates) for rates in parts]


@dataclass
class Day:
    """What is done to a fleet, and what is seen of it; times in seconds after the day's begin."""

    fleet: Fleet
    seconds: float
    began: float = 0.0
    done: list[dict[str, Any]] = field(default_factory=list)
    loads: list[dict[str, Any]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def now_s(self) -> float:
        return time.time() - self.began

    @property
    def script(self) -> list[tuple[float, str, Callable[[], None]]]:
        """When (a share of the day), what it is called, and the deed."""
        heads = {"kind": "heads", "amount": 1}
        layers = {"kind": "layers", "amount": LAYERS_AWAY}
        return [
            (0.03, "operator orders heads away", lambda: self.move(heads)),
            (0.07, "operator orders them home", self.bring_home),
            (0.24, "operator takes an order back", self.change_of_mind),
            (0.35, "controller is killed", self.kill_controller),
            (0.43, "operator orders layers away", lambda: self.move(layers)),
            (0.47, "operator orders them home", self.bring_home),
            (0.51, "lender is killed", self.kill_lender),
            (0.81, "operator orders heads away", lambda: self.move(heads)),
            (0.86, "lender is killed", self.kill_lender),
        ]

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Deeds and samples in threads of their own."""
        self.began = time.time()
        threads = [threading.Thread(target=each) for each in (self._act, self._sample)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _act(self) -> None:
        for share, name, deed in self.script:
            if self._over.wait(max(0.0, share * self.seconds - self.now_s)):
                self.failed.append(f"{name}: the day was over")
                continue
            at_s = self.now_s
            try:
                deed()
            except (TimeoutError, httpx.HTTPError, LookupError, psutil.Error) as error:
                self.failed.append(f"{name}: {error}")
            self.done.append({"at_s": at_s, "until_s": self.now_s, "what": name})
            print(f"{at_s:6.0f} s: {name}, done at {self.now_s:.0f} s", flush=True)

    def _sample(self) -> None:
        while not self._over.wait(_SAMPLE_S):
            with contextlib.suppress(httpx.HTTPError):  # the controller is being restarted
                if loads := self.fleet.loads():
                    self.loads.append({"at_s": self.now_s, **loads})

    # Deeds

    def move(self, shard: Mapping[str, Any]) -> None:
        """Order it away, and see it go; from now on the controller only advises."""
        self.fleet.mode("advise")
        self.fleet.bring_home()
        self.fleet.carry_out({"back": False, **shard})

    def change_of_mind(self) -> None:
        """Order heads away, and take the order back as soon as it is under way."""
        self.fleet.mode("advise")
        plan = self.fleet.plan({"back": False, "kind": "heads", "amount": 1})
        self.fleet.apply(plan)
        self.fleet.post(f"plans/{plan}/abort").raise_for_status()
        self.fleet.ended(plan, "cancelled")
        self.fleet.mode("auto")

    def bring_home(self) -> None:
        """The controller acts again."""
        self.fleet.bring_home()
        self.fleet.mode("auto")

    def kill_controller(self) -> None:
        (process,) = (
            each
            for each in self.fleet.server.members()
            if "loomserve-controller" in " ".join(each.cmdline())
        )
        process.kill()
        self.fleet.wait(lambda: self.fleet.get("rebalancing")["mode"] == "auto", 120, "it is back")

    def kill_lender(self) -> None:
        pid = self.fleet.replica(SOUTH)["engine_pid"]
        psutil.Process(pid).kill()
        self.fleet.wait(
            lambda: self.fleet.replica(SOUTH)["engine_pid"] != pid, 240, "there is another replica"
        )
        self.fleet.wait_ready(240)
        self.fleet.mode("auto")


def measure(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Day]:
    of = phases(args.minutes, args.rate)
    all_ = load(arrivals(args.trace), of, SEED)
    model = str(catalog.resolve("demo", Path.cwd()))
    with Fleet("lending", model, args.port, folder, EXACT).running(args.start_timeout) as fleet:
        fleet.lend(False)
        undisturbed = asyncio.run(replay(fleet.url, all_, SEED, _AT_ONCE))
        print(f"{len(all_)} requests were served undisturbed", flush=True)
        fleet.lend(True)
        fleet.mode("auto")
        day = Day(fleet, 60 * args.minutes)
        with contextlib.ExitStack() as watching:
            prometheus = None
            if args.alerts:
                watched = scraping(fleet.url, folder, RULES, scrape_s=_SCRAPE_S)
                prometheus = watching.enter_context(watched)
            with day.going_on():
                answers = asyncio.run(serve(fleet.url, all_, SEED, time.perf_counter()))
            alerts = prometheus and alerts_of(day, of, prometheus)
            if prometheus and args.dashboard:
                overview = next(each for each in DASHBOARDS if each.name == "overview")
                draw(overview, Answers(prometheus.url, day.now_s, _SCRAPE_S), args.dashboard)
        events = fleet.events(day.began)
        borrowing = fleet.replica(NORTH)["borrowing"]
    return {
        **compared(undisturbed, answers),
        "what_was_not_done": day.failed,
        "actions": Counter(
            f"{event['action'].get('kind', event['action']['action'])} {event['kind']}"
            for event in events
            if event["action"] is not None and event["kind"] != "begun"
        ),
        "why_actions_failed": Counter(
            event["message"] for event in events if event["kind"] == "failed"
        ),
        "alerts": alerts,
        "broken_loans": borrowing and borrowing["broken"],
        "done": day.done,
        "minutes": args.minutes,
        "rate": args.rate,
        "runs": 1,
    }, day


def alerts_of(day: Day, of: Sequence[Phase], prometheus: Prometheus) -> dict[str, Any]:
    """What fired, and for what."""
    faults = [Fault(each["what"], each["at_s"], each["until_s"]) for each in day.done]
    faults += [Fault(BURST, begin, end) for begin, end, _ in bursts(of)]
    end = time.time()
    fired, pending = (alarms(prometheus, day.began, end, state) for state in ("firing", "pending"))
    return report(fired, pending, faults, len(prometheus.rules()))


def bursts(of: Sequence[Phase]) -> Iterator[tuple[float, float, list[str]]]:
    """Begin and end of each, in seconds, and the models that are asked for most."""
    begin, least = 0.0, of[0].rates[NORTH]
    for phase in of:
        popular = [name for name in DEVICES if phase.rates.get(name, 0.0) > 2 * least]
        if popular:
            yield begin, begin + phase.seconds, popular
        begin += phase.seconds


def compared(undisturbed: Sequence[Answer], answers: Sequence[Answer]) -> dict[str, Any]:
    pairs = list(zip(undisturbed, answers, strict=True))
    different = [one for one, two in pairs if one.tokens != two.tokens]
    failed = [one.error for pair in pairs for one in pair if one.error]
    for one in different:
        print(f"different: {one.asked.model} at {one.asked.at_s:.0f} s", flush=True)
    return {
        "requests": len(pairs),
        "tokens": sum(len(two.tokens) for _, two in pairs),
        "different_answers": len(different),
        "failed_requests": len(failed),
        "failures": failed[:5],
    }


def plot(day: Day, of: Sequence[Phase], file: Path) -> None:
    import matplotlib as mpl

    # The same figures give the same file.
    mpl.rcParams["svg.hashsalt"] = "day"
    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    for model, device in DEVICES.items():
        seen = [(each["at_s"] / 60, each[device]) for each in day.loads if device in each]
        axes.plot(*zip(*seen, strict=True), label=f"{device} ({model})")
    for begin, end, popular in bursts(of):
        axes.axvspan(begin / 60, end / 60, color="gray", alpha=0.15)
        axes.text(begin / 60, axes.get_ylim()[1], f" {' and '.join(popular)}", va="bottom")
    for number, each in enumerate(day.done):
        axes.axvline(each["at_s"] / 60, color="black", linewidth=0.7, linestyle=":")
        axes.text(each["at_s"] / 60, 0.02 + 0.09 * (number % 4), each["what"], fontsize=7)
    axes.set_xlabel("minutes")
    axes.set_ylabel("utilisation (compute + memory)")
    axes.legend(loc="upper right")
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rate", type=float, default=0.05, help="of a hot model outside bursts")
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the loads (SVG)")
    parser.add_argument(
        "--dashboard", type=Path, metavar="FILE", help="with --alerts: draw the overview (SVG, PNG)"
    )
    parser.add_argument("--alerts", action="store_true", help="have Prometheus watch the alerts")
    parser.add_argument("--port", type=int, default=18_672)
    parser.add_argument("--start-timeout", type=float, default=600)
    args = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        result, day = measure(args, Path(folder))
    if args.plot:
        plot(day, phases(args.minutes, args.rate), args.plot)
    publish("day", result, setup=said_by(args, "plot", "dashboard", "port"), facts=facts)
    wrong = result["different_answers"], result["failed_requests"], day.failed
    false_alarms = result["alerts"] and result["alerts"]["false_alarms"]
    return int(any(wrong) or bool(false_alarms))


if __name__ == "__main__":
    sys.exit(main())
