"""A cluster of three nodes that answers requests all the time, while a node loses its power.

The head keeps what there is but once; the two others have an engine of the demo model in float32 on
a core each. Each node has a gateway. The nodes share this machine's cores, and Ray's raylet ends if
its agents take more than 15 s to start: requests come so seldom that a node can.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Event, Thread

import httpx

from benchmarks.load import new_session
from tests.cluster.cluster import MODEL, PORT, Cluster, RunningNode, answers, until
from tests.streams import (
    Answer,
    Asked,
    difference,
    mixture,
    stream,
)

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
        """Cut a node and have it back.

        Returns:
            What clients saw: ``failed_requests`` got no token, ``lost_streams`` ended early,
            ``wrong_answers`` are whole and other than undisturbed ones; ``pause_s`` is the longest
            time that a stream stood still, ``back_after_s`` is from the node's start until its
            engine and gateway answer.
        """
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
