"""What would the controller gain by replicas on GPUs? A simulation, in which nothing is measured.

The controller's own decisions (:mod:`loomserve.platform.rebalancing.policy`) over two simulated
GPUs and two models, with the phases and arms of :mod:`benchmarks.rebalance_replicas`. On a GPU the
front ends and clients take nothing of what engines compute with, which on a machine of two cores
they do.

A GPU takes for a step as long as for reading the weights and the KV of what is decoded, or for
computing all of its tokens, whichever is longer, at ``MEMORY`` and ``COMPUTE`` of an H100's data
sheet; engines that share one take turns. Each step has at most ``STEP_TOKENS`` tokens, those of
decoding first. A request is admitted once its whole KV fits. It goes to the replica that has the
fewest; one that is moved has its KV computed again. A replica serves ``START_S`` after its start.

A model is cold here at one request in ten seconds: at two a second its steps, each of which reads
all weights, keep a GPU busy all the time, and half of such a GPU is no gain.

The last line of the output is one JSON object, also written to ``benchmarks/results``. Run it as
``python -m benchmarks.rebalance_simulated``.
"""

from __future__ import annotations

import argparse
import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from benchmarks.popularity import DEVICES, Answer, Asked, Phase, load
from benchmarks.rebalance import Run, Slo, bursts, phases
from benchmarks.rebalance_replicas import figures
from benchmarks.result_files import machine, publish, said_by
from benchmarks.workload import Arrival, azure, azure_like
from loomserve.platform.config.rebalancing import Rebalancing
from loomserve.platform.rebalancing.policy.actions import (
    Action,
    AddReplica,
    MoveRequests,
    RemoveReplica,
)
from loomserve.platform.rebalancing.policy.correction import Corrections
from loomserve.platform.rebalancing.policy.effects import apply
from loomserve.platform.rebalancing.policy.heat import Heat, classify
from loomserve.platform.rebalancing.policy.limits import exceeded, unable
from loomserve.platform.rebalancing.policy.planner import propose
from loomserve.platform.rebalancing.policy.rates import Rates
from loomserve.platform.rebalancing.policy.snapshot import (
    DeviceSnapshot,
    EngineSnapshot,
    Link,
    ModelSnapshot,
    Snapshot,
    flaws,
    utilisations,
)

# An H100 (SXM), of whose data sheet kernels reach so much, and Llama-3-8B in bfloat16.
MEMORY = 0.7 * 3.35e12
COMPUTE = 0.5 * 989e12
GPU_BYTES = 80_000_000_000
WEIGHTS = 16_060_000_000
PARAMETERS = 8.03e9
LAYERS, HEADS = 32, 8
TOKEN_BYTES = 131_072
LINK = 50e9
"""Bytes a second between the two."""
STEP_S = 0.002
"""Of each step, beside what the GPU computes."""
STEP_TOKENS = 2048
PLACES = 256
KV_BYTES = 15_000_000_000
"""Of a replica; where a model has one alone, that has twice as much."""
OTHER_BYTES = 1_250_000_000
START_S = 40.0
WINDOW_S = 10.0
"""Of the rates at which an engine's work grows."""
SINGLES = 20
"""Requests that are sent one by one, for the SLO."""
ARMS = ("static", "auto", "unified")


@dataclass(eq=False)
class Request:
    answer: Answer
    context: int
    """Tokens whose KV it needs before it decodes."""
    left: int
    prefilled: int = 0

    @property
    def kv_bytes(self) -> int:
        return (self.context + self.left) * TOKEN_BYTES


@dataclass(eq=False)
class Engine:
    id: str
    model: str
    device: str
    kv_bytes: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    work: dict[str, float] = field(
        default_factory=lambda: {"prefill": 0.0, "attention": 0.0, "linear": 0.0, "tokens": 0.0}
    )
    steps: bool = False
    draining: bool = False
    step_s: float = STEP_S

    @property
    def queue(self) -> int:
        return len(self.waiting) + len(self.running)

    @property
    def kv_used(self) -> int:
        return sum(each.prefilled * TOKEN_BYTES for each in self.running)

    def admit(self) -> None:
        room = self.kv_bytes - sum(each.kv_bytes for each in self.running)
        while self.waiting and len(self.running) < PLACES and self.waiting[0].kv_bytes <= room:
            room -= self.waiting[0].kv_bytes
            self.running.append(self.waiting.popleft())

    def begin_step(self) -> tuple[float, list[tuple[Request, int]]]:
        """Its seconds on a GPU of its own, and each request's tokens."""
        decoding = [each for each in self.running if each.prefilled >= each.context]
        share = [(each, 1) for each in decoding]
        room = STEP_TOKENS - len(share)
        for each in self.running:
            if (missing := each.context - each.prefilled) > 0 and room > 0:
                share.append((each, min(missing, room)))
                room -= min(missing, room)
        attention_s = sum(each.prefilled for each in decoding) * TOKEN_BYTES / MEMORY
        linear_s = WEIGHTS / MEMORY
        tokens = STEP_TOKENS - room
        seconds = STEP_S + max(attention_s + linear_s, 2 * PARAMETERS * tokens / COMPUTE)
        decodes = len(decoding) > 0
        self.work["attention"] += attention_s
        self.work["linear"] += decodes * linear_s
        self.work["prefill"] += seconds - attention_s - decodes * linear_s
        self.work["tokens"] += tokens
        self.step_s = seconds
        return seconds, share

    def end_step(self, share: Sequence[tuple[Request, int]], now_s: float) -> None:
        for each, tokens in share:
            if each not in self.running:
                continue  # it was moved meanwhile
            each.prefilled += tokens
            if each.prefilled >= each.context:
                # The step that ends a prompt gives a token, too.
                each.context += 1
                each.left -= 1
                each.answer.times.append(now_s)
                each.answer.tokens.append(0)
        self.running = [each for each in self.running if each.left > 0]


class Cluster:
    """Engines and their requests, by a clock of its own."""

    def __init__(self, everywhere: bool, kv_bytes: int) -> None:
        self.now_s = 0.0
        self.engines: list[Engine] = []
        self._kv_bytes = kv_bytes
        self._events: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        for model, own in DEVICES.items():
            for device in DEVICES.values():
                if everywhere or device == own:
                    self.add(model, device)

    def at(self, at_s: float, what: Any) -> None:
        heappush(self._events, (at_s, next(self._numbers), what))

    def run(self) -> None:
        while self._events:
            self.now_s, _, what = heappop(self._events)
            what()

    def add(self, model: str, device: str) -> None:
        name = f"{model}-{next(self._numbers)}"
        self.engines.append(Engine(name, model, device, self._kv_bytes))

    def of(self, model: str) -> list[Engine]:
        return [each for each in self.engines if each.model == model and not each.draining]

    def send(self, model: str, request: Request) -> None:
        engine = min(self.of(model), key=lambda each: each.queue)
        engine.waiting.append(request)
        self.step(engine)

    def step(self, engine: Engine) -> None:
        """Have an engine go on, unless it does."""
        engine.admit()
        if engine.steps or not engine.running:
            if engine.draining and not engine.queue and engine in self.engines:
                self.engines.remove(engine)
            return
        engine.steps = True
        seconds, share = engine.begin_step()
        turns = sum(each.steps for each in self.engines if each.device == engine.device)
        self.at(self.now_s + seconds * turns, lambda: self._stepped(engine, share))

    def _stepped(self, engine: Engine, share: Sequence[tuple[Request, int]]) -> None:
        engine.steps = False
        engine.end_step(share, self.now_s)
        self.step(engine)


class Controller:
    """Looks, decides and acts as the platform's does, one action at a time."""

    def __init__(self, cluster: Cluster, until_s: float) -> None:
        self._options, self._cluster, self._until_s = Rebalancing(), cluster, until_s
        self._heat: dict[str, Heat] = {}
        self._rates = Rates(WINDOW_S)
        self._plan: list[Action] = []
        self._acts = False
        self._changed_at_s = float("-inf")
        self.done: list[dict[str, Any]] = []
        cluster.at(1.0, self._second)

    def _second(self) -> None:
        cluster = self._cluster
        for each in cluster.engines:
            self._rates.take(each.id, cluster.now_s, dict(each.work))
        if not self._acts and (snapshot := self._snapshot()) is not None:
            if self._plan:
                self._begin(snapshot, self._plan.pop(0))
            elif round(cluster.now_s) % round(self._options.period_s) == 0:
                self._look(snapshot)
        if cluster.now_s < self._until_s:
            cluster.at(cluster.now_s + 1.0, self._second)

    def _look(self, snapshot: Snapshot) -> None:
        self._heat = classify(self._heat, utilisations(snapshot), self._options)
        proposal = propose(snapshot, self._heat, Corrections(), self._options)
        self._plan = [each.action for each in proposal.chosen]
        if self._plan:
            self._begin(snapshot, self._plan.pop(0))

    def _begin(self, snapshot: Snapshot, action: Action) -> None:
        if self._is_refused(snapshot, action):
            self._plan = []
            return
        self._acts = True
        match action:
            case AddReplica():
                ends_s = self._cluster.now_s + START_S
                self._cluster.at(ends_s, lambda: self._add(action))
            case RemoveReplica():
                leaving = self._engine(action.engine)
                leaving.draining = True
                self._move(action.engine, None, leaving.queue)
                self._acted(action, leaving.model)
            case MoveRequests():
                self._move(action.engine, action.to, action.requests)
                self._acted(action, self._engine(action.to).model)
            case _:
                raise AssertionError(f"{action} moves what is not simulated")

    def _is_refused(self, snapshot: Snapshot, action: Action) -> bool:
        """Whether it cannot be done any more, as much may have changed since it was planned."""
        try:
            if unable(snapshot, action, self._options) is not None:
                return True
            after = apply(snapshot, action)
        except LookupError:
            return True
        return exceeded(snapshot, snapshot, after, self._options) is not None

    def _add(self, action: AddReplica) -> None:
        self._cluster.add(action.model, action.device)
        self._acted(action, action.model)

    def _move(self, from_: str, to: str | None, requests: int) -> None:
        """Those that wait, the last first, then those that run; their KV is computed again."""
        engine = self._engine(from_)
        for _ in range(requests):
            if not engine.queue:
                break
            one = engine.waiting.pop() if engine.waiting else engine.running.pop()
            one.prefilled = 0
            if to is None:
                self._cluster.send(engine.model, one)
            else:
                self._engine(to).waiting.append(one)
                self._cluster.step(self._engine(to))
        self._cluster.step(engine)

    def _acted(self, action: Action, model: str) -> None:
        now_s = self._cluster.now_s
        self._acts, self._changed_at_s = False, now_s
        said = {**action.model_dump(mode="json"), "model": model}
        self.done.append({"at_s": now_s, "action": said})

    def _engine(self, name: str) -> Engine:
        return next(each for each in self._cluster.engines if each.id == name)

    def _snapshot(self) -> Snapshot | None:
        """None while it is not fit for decisions."""
        cluster, now_s = self._cluster, self._cluster.now_s
        if any(self._rates.of(each.id) is None for each in cluster.engines):
            return None
        engines = tuple(map(self._observed, cluster.engines))
        allocated = {
            device: sum(
                WEIGHTS + OTHER_BYTES + each.kv_bytes
                for each in cluster.engines
                if each.device == device
            )
            for device in DEVICES.values()
        }
        snapshot = Snapshot(
            at_s=now_s,
            devices=tuple(
                DeviceSnapshot(
                    name=name,
                    node="node",
                    memory_bytes=GPU_BYTES,
                    allocated_bytes=taken,
                    measured_at_s=now_s,
                )
                for name, taken in allocated.items()
            ),
            models=tuple(self._model(name, engines) for name in DEVICES),
            engines=engines,
            links=tuple(
                Link(
                    source=one, target=other, bytes_per_s=LINK, latency_s=1e-5, measured_at_s=now_s
                )
                for one, other in itertools.permutations(DEVICES.values(), 2)
            ),
            changed_at_s=self._changed_at_s,
        )
        return None if flaws(snapshot, self._options) else snapshot

    def _observed(self, engine: Engine) -> EngineSnapshot:
        """As :mod:`loomserve.platform.rebalancing.observe` does."""
        rates = self._rates.of(engine.id)
        assert rates is not None
        asked = engine.queue / len(engine.running) if engine.running else 1.0
        return EngineSnapshot(
            id=engine.id,
            model=engine.model,
            device=engine.device,
            prefill=rates["prefill"] * asked,
            attention=rates["attention"] * asked,
            linear=rates["linear"] * asked,
            queue=engine.queue,
            waiting=len(engine.waiting),
            max_running=PLACES,
            kv_bytes=engine.kv_bytes,
            kv_used_bytes=engine.kv_used,
            kv_growth=rates["tokens"] * TOKEN_BYTES,
            recompute_s=2 * PARAMETERS / COMPUTE / TOKEN_BYTES,
            draining=engine.draining,
            layers=LAYERS,
            layer_bytes=WEIGHTS // LAYERS,
            heads=HEADS,
            tpot_s=engine.step_s,
            sync_s=engine.step_s,
            drain_s=200 * engine.step_s,
            measured_at_s=self._cluster.now_s,
        )

    def _model(self, name: str, engines: Sequence[EngineSnapshot]) -> ModelSnapshot:
        of = [each for each in engines if each.model == name]
        own = DEVICES[name]
        return ModelSnapshot(
            name=name,
            devices=(own, *(each for each in DEVICES.values() if each != own)),
            replicas=len(of),
            replica_bytes=WEIGHTS + OTHER_BYTES + KV_BYTES,
            replica=of[0].without_work(),
            start_s=START_S,
        )


def simulated(
    arm: str, all_: Sequence[Asked], counted: Sequence[tuple[float, float]], until_s: float
) -> Run:
    cluster = Cluster(arm == "unified", KV_BYTES * (2 if arm == "static" else 1))
    controller = Controller(cluster, until_s) if arm == "auto" else None
    answers = []
    for asked in all_:
        answer = Answer(asked, asked.at_s)
        answers.append(answer)
        request = Request(answer, asked.request.tokens, asked.request.output_tokens)
        cluster.at(asked.at_s, lambda one=request, of=asked.model: cluster.send(of, one))
    cluster.run()
    return Run.of(arm, answers, 0.0, counted, controller.done if controller else [])


def idle(trace: Sequence[Arrival]) -> Slo:
    """What single requests take."""
    phase = Phase(SINGLES, dict.fromkeys(DEVICES, 1.0))
    singles = [
        Asked(each.model, 60.0 * place, each.request)
        for place, each in enumerate(load(trace, [phase], "singles"))
    ]
    return Slo.over(simulated("unified", singles, [(0.0, 60.0 * len(singles))], 0.0).answers)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    whole = (
        azure(args.trace) if args.trace else azure_like("conversation", requests=16_000, seed="t")
    )
    # A time per token needs two.
    trace = [each for each in whole if each.output_tokens > 1]
    of, slo = phases(args), idle(trace)
    runs: dict[str, list[Run]] = {arm: [] for arm in ARMS}
    steady: dict[str, list[Run]] = {"static": [], "auto": []}
    seconds = sum(phase.seconds for phase in of)
    for number, arm in itertools.product(range(args.runs), ARMS):
        found = simulated(arm, load(trace, of, str(number)), bursts(of), seconds)
        runs[arm].append(found)
        print(f"run {number + 1}, {arm}: {found.figures(slo)}", flush=True)
        for action in found.moves:
            print(f"  {action['at_s']:.0f} s: {action['action']}", flush=True)
        if arm in steady:
            calm = load(trace, [Phase(args.burst_s, of[0].rates)], f"{number}/steady")
            counted = [(0.0, args.burst_s)]
            steady[arm].append(simulated(arm, calm, counted, args.burst_s))
    return figures(runs, steady, slo, of)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", type=float, default=0.1, help="of a model outside bursts")
    parser.add_argument("--burst-s", type=float, default=450.0)
    parser.add_argument("--burst-times", type=float, default=300.0, help="the rate within bursts")
    parser.add_argument("--rest-s", type=float, default=120.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--trace", type=Path, help="an Azure conversation trace, .csv.gz")
    args = parser.parse_args()
    facts = machine()
    publish("rebalance_simulated", measure(args), setup=said_by(args), facts=facts)


if __name__ == "__main__":
    main()
