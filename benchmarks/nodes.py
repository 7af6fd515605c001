"""What do clients see when a node of a cluster loses its power?

Three nodes of namespaces on this machine (:mod:`tests.cluster.nodes`, which needs root): the head,
which keeps what there is but once, and two with an engine of the demo model in float32 on a core
each. Each node has a gateway. Short requests of all kinds of
:data:`benchmarks.continuation_requests.KINDS` come all the time through the gateways of nodes that
stay. Then

``cut``       a node with an engine is cut (all its processes are killed at once), and
``head_cut``  the head is, with Ray's GCS, Serve's controller and ours,

is away for some time, starts again, and is waited for until all is as it was. Meanwhile counted are
requests that got no token (``failed_requests``), streams that ended early (``lost_streams``), and
whole answers other than undisturbed ones (``wrong_answers``). ``pause_s`` is the longest time that
a stream stood still, ``back_after_s`` is from the node's start until its engine and gateway answer.

The nodes share this machine's cores, and Ray's raylet ends if its agents take more than 15 s to
start: requests come so seldom that a node can.

What gateways carry and what decisions and fetches take have commands of their own: front_end,
decisions and nodes_kv. The last line of the output is one JSON object. Run it as
``python -m benchmarks.nodes`` or ``make bench-nodes``.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx

from benchmarks.continuation_requests import (
    Answer,
    Asked,
    difference,
    mixture,
    new_session,
    stream,
)
from benchmarks.result_files import machine, publish, said_by
from tests.cluster.cluster import MODEL, PORT, Cluster, RunningNode, answers, cluster, until
from tests.cluster.nodes import network, why_not

HEAD, WORKERS = "one", ("two", "three")
KINDS, TOKENS = 11, 40
WHOLE_S = 400.0
_WARM_S = 10.0


@dataclass
class Traffic:
    """Requests that come at a steady rate, whatever becomes of those before."""

    urls: Sequence[str]
    key: str
    asked: Sequence[Asked]
    every_s: float
    answers: list[Answer] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._ended = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def end(self) -> list[Answer]:
        """Send no more; returns all, once they have ended."""
        self._ended.set()
        self._thread.join()
        return self.answers

    async def _run(self) -> None:
        async with new_session(self.key) as session, asyncio.TaskGroup() as running:
            number = 0
            while not self._ended.is_set():
                asked = self.asked[number % len(self.asked)].salted(uuid.uuid4().hex)
                answer = Answer(asked, time.perf_counter())
                self.answers.append(answer)
                url = self.urls[number % len(self.urls)]
                running.create_task(stream(session, url, answer))
                number += 1
                await asyncio.sleep(self.every_s)


class Nodes:
    """The cluster, and the platform on it."""

    def __init__(self, running: Cluster) -> None:
        config = running.config(engines_on=WORKERS)
        config["cluster"]["gateways"] = "each_node"
        config["server"]["host"] = "0.0.0.0"
        running.write(config)
        self.cluster = running
        self.platform = running.serve()
        self.asked = mixture(MODEL, KINDS, TOKENS, 0, 1)
        until(self.whole, WHOLE_S, running.ray_logs)

    def url(self, node: RunningNode) -> str:
        return f"http://{node.machine.address}:{PORT}"

    def whole(self) -> bool:
        """Whether each node has its gateway, and each worker its engine."""
        nodes = self.cluster.nodes
        if not all(answers(self.url(node)) for node in nodes):
            return False
        headers = {"Authorization": f"Bearer {self.platform.admin_token}"}
        try:
            found = httpx.get(f"{self.url(nodes[0])}/admin/v1/nodes", headers=headers, timeout=10)
            states = {each["name"]: each for each in found.raise_for_status().json()}
        except httpx.HTTPError:
            return False
        return all(
            name in states and states[name]["replicas"] == (name in WORKERS)
            for name in (HEAD, *WORKERS)
        )

    def undisturbed(self) -> dict[str, Answer]:
        """By kind."""
        url = self.url(self.cluster.nodes[1])
        traffic = Traffic([url], self.platform.key, self.asked, every_s=2.0)
        until(lambda: len(traffic.answers) >= KINDS, WHOLE_S)
        found = traffic.end()[:KINDS]
        if lost := [one.lost for one in found if one.lost]:
            raise RuntimeError(f"undisturbed requests failed: {lost[0]}")
        return {one.asked.kind: one for one in found}

    def cut(
        self, name: str, away_s: float, every_s: float, expected: dict[str, Answer]
    ) -> dict[str, float]:
        """Cut a node and have it back; returns what clients saw."""
        victim = next(each for each in self.cluster.nodes if each.machine.name == name)
        stay = [self.url(each) for each in self.cluster.nodes if each is not victim]
        traffic = Traffic(stay, self.platform.key, self.asked, every_s)
        time.sleep(_WARM_S)
        victim.machine.cut_power()
        cut_at = time.perf_counter()
        time.sleep(away_s)
        victim.machine.boot()
        started_at = time.monotonic()
        victim.start()
        until(self.whole, WHOLE_S, self.cluster.ray_logs)
        back_s = time.monotonic() - started_at
        found = traffic.end()
        lost = [one for one in found if one.lost]
        for one in lost:
            print(f"  {one.sent - cut_at:+.1f} s {one.asked.kind}: {one.lost}", flush=True)
        whole = [one for one in found if not one.lost]
        wrong = [one for one in whole if difference(expected[one.asked.kind], one)]
        return {
            "requests": len(found),
            "failed_requests": sum(one.pieces == 0 for one in lost),
            "lost_streams": sum(one.pieces > 0 for one in lost),
            "wrong_answers": len(wrong),
            "pause_s": max(map(_longest_gap, whole), default=0.0),
            "back_after_s": back_s,
        }


def _longest_gap(answer: Answer) -> float:
    times = sorted(at for choice in answer.choices.values() for at in choice.times)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return max([times[0] - answer.sent, *gaps]) if times else 0.0


def measure(folder: Path, runs: int, away_s: float, every_s: float) -> dict[str, Any]:
    figures: dict[str, list[dict[str, float]]] = {"cut": [], "head_cut": []}
    with ExitStack() as stack:
        machines = stack.enter_context(network(HEAD, *WORKERS))
        nodes = Nodes(stack.enter_context(cluster(machines, folder)))
        expected = nodes.undisturbed()
        for run in range(runs):
            for name, victim in (("cut", WORKERS[run % 2]), ("head_cut", HEAD)):
                seen = nodes.cut(victim, away_s, every_s, expected)
                print(f"{name} {run + 1}: {seen}", flush=True)
                figures[name].append(seen)
    return summary(figures)


def summary(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Sums of what must not be, medians and extremes of times."""
    result: dict[str, Any] = {}
    for name, runs in figures.items():
        for key in runs[0]:
            values = [run[key] for run in runs]
            if key.endswith("_s"):
                spread = {"median": statistics.median(values), "all": values}
                result[f"{name}_{key}"] = spread
            else:
                result[f"{name}_{key}"] = sum(values)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="cuts of each kind")
    parser.add_argument("--away-s", type=float, default=33.0, help="how long a node is away")
    parser.add_argument("--every-s", type=float, default=4.0, help="seconds between two requests")
    options = parser.parse_args()
    if (problem := why_not()) is not None:
        parser.error(problem)
    facts = machine()
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(Path(folder), options.runs, options.away_s, options.every_s)
    publish("nodes", figures, setup=said_by(options), facts=facts)
    bad = ("failed_requests", "lost_streams", "wrong_answers")
    return int(any(figures[f"{name}_{key}"] for name in ("cut", "head_cut") for key in bad))


if __name__ == "__main__":
    sys.exit(main())
