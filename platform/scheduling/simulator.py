"""A simulator of an engine's schedule, in steps and KV blocks, that asks the engine's policies.

It answers what a policy would do with given requests before an engine runs it, and checks that an
engine did what its policies say. The rules beside the policies are those of vLLM's scheduler: a
step's tokens go to running requests first, in their order; one that gets no block preempts the last
of them; waiting ones start while a place, tokens and blocks for all their tokens are left.

Not modelled: blocks that requests share, so that whatever is computed again is computed whole;
tokens that are scheduled before the last ones are known (asynchronous scheduling, speculation);
several kinds of KV cache in one model.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from loomserve.platform.config.scheduling import QUEUE_ORDERS
from loomserve.platform.scheduling.policy.admission import (
    Growing,
    PastAnswers,
    StartCandidate,
    fitting,
    never_computed_twice,
    start,
)
from loomserve.platform.scheduling.policy.hints import Expected
from loomserve.platform.scheduling.policy.preemption import (
    PREEMPTIONS,
    PreemptionMode,
    StayingRequest,
    Victim,
)
from loomserve.platform.scheduling.policy.queue import QueuedRequest, QueuePolicy


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request with the length that its answer is going to have.

    Attributes:
        output_tokens: Tokens that it generates before it ends by itself; at least 1.
        max_tokens: Tokens that it may generate.
        deadline_s: Deadline by the clock of ``arrived_s``.
        expected: Prediction of ``output_tokens``; without it policies know ``max_tokens`` alone.
        cached_tokens: Tokens of the prompt that are not computed when it first starts.
    """

    name: str
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    deadline_s: float | None = None
    expected: Expected | None = None
    cached_tokens: int = 0
    background: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine.

    Attributes:
        blocks: Blocks that requests can hold: vLLM's number without its null block.
        block_bytes: Bytes of a block in swap space.
        running: Requests that may run at once, vLLM's ``max_num_seqs``.
        step_tokens: vLLM's ``max_num_batched_tokens``.
        spare_blocks: Blocks that stay free when a request starts beside others, vLLM's
            ``watermark``.
    """

    blocks: int
    block_tokens: int
    block_bytes: int
    running: int
    step_tokens: int
    swap_bytes: int = 0
    spare_blocks: int = 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


@dataclass(frozen=True, slots=True)
class Policies:
    """Names of the policies that an engine uses, and the options of its queue order."""

    queue: str = "fcfs"
    preemption: str = "recompute"
    chunked_recompute: bool = True
    peak_admission: bool = True
    queue_options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepShare:
    """A request's share of a step: ``tokens`` after the ``computed`` ones."""

    name: str
    computed: int
    tokens: int


@dataclass(slots=True)
class ScheduledStep:
    """One step of an engine.

    Attributes:
        shares: Shares of its requests, in the order in which they were scheduled.
        preempted: Requests that had to leave before it, with their modes.
        resumed: Requests among ``shares`` that had left before, with their modes.
    """

    start_s: float
    shares: list[StepShare] = field(default_factory=list)
    preempted: dict[str, PreemptionMode] = field(default_factory=dict)
    resumed: dict[str, PreemptionMode] = field(default_factory=dict)
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted seconds of an engine's work.

    Attributes:
        swap_s: To copy so many tokens' KV out of memory and back.
        recompute_s: To compute so many tokens again.
        step_s: Of a step with the swaps in it.
        token_s: Of a token that a running request generates.
    """

    swap_s: Callable[[int], float]
    recompute_s: Callable[[int], float]
    step_s: Callable[[ScheduledStep], float]
    token_s: float = 0.0

    def worth_swapping(self, tokens: int) -> bool:
        return self.swap_s(tokens) < self.recompute_s(tokens)


@dataclass(frozen=True, slots=True)
class Times:
    """Life of a finished request, in seconds of one clock."""

    arrived_s: float
    started_s: float
    finished_s: float

    @property
    def weighted_turnaround(self) -> float:
        """AdaptiveLLM, equation 5: at least 1, and 1 if it never waited to start."""
        return (self.finished_s - self.arrived_s) / (self.finished_s - self.started_s)


@dataclass(slots=True, eq=False)
class _Progress:
    """A request as the engine has it; ``blocks`` in memory, ``swap_bytes`` in swap space."""

    request: SimulatedRequest
    generated: int = 0
    computed: int = 0
    blocks: int = 0
    swap_bytes: int = 0
    left_by: PreemptionMode | None = None
    prefilling: bool = False
    started_s: float | None = None

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated

    @property
    def most_tokens(self) -> int:
        return self.request.prompt_tokens + self.request.max_tokens

    def queued(self, costs: Costs, *, timed: bool) -> QueuedRequest:
        """``timed``: the queue looks at the predicted time to finish."""
        expected, answer = self.request.expected, self.request.max_tokens
        left_s, tokens = 0.0, self.tokens
        if expected is not None:
            answer = expected.answer(self.generated, answer)
            tokens = self.request.prompt_tokens + answer
            if timed:
                left_s = costs.recompute_s(self.tokens - self.computed)
                left_s += costs.token_s * (answer - self.generated)
        return QueuedRequest(
            arrived_s=self.request.arrived_s,
            tokens=tokens,
            left=self.request.prompt_tokens + answer - self.computed,
            left_s=left_s,
            deadline_s=self.request.deadline_s,
            background=self.request.background,
        )


class Simulator:
    """Engine that computes nothing; :meth:`schedule` and :meth:`end` make a step. Requests may come
    while it runs; whoever runs it long takes ended ones from ``times``."""

    def __init__(
        self, requests: Iterable[SimulatedRequest], limits: Limits, policies: Policies, costs: Costs
    ) -> None:
        """Raises ``ValueError`` for a request that the engine's memory cannot hold."""
        self._limits = limits
        self._policies = policies
        self._costs = costs
        self._queue: QueuePolicy = QUEUE_ORDERS.make(policies.queue, policies.queue_options)
        self._coming: deque[_Progress] = deque()
        for request in sorted(requests, key=lambda one: one.arrived_s):
            self.add(request)
        self._waiting: deque[_Progress] = deque()
        self._running: list[_Progress] = []
        self._free_blocks = limits.blocks
        self._free_swap = limits.swap_bytes
        self._nothing_started = False
        self._past_answers = PastAnswers()
        self.times: dict[str, Times] = {}

    def add(self, request: SimulatedRequest) -> None:
        """Take in one more request, which comes no sooner than all others. Raises ValueError if the
        engine's memory cannot hold it."""
        one = _Progress(request)
        if self._limits.blocks_for(one.most_tokens) > self._limits.blocks:
            raise ValueError(f"{request.name} does not fit into {self._limits.blocks} blocks")
        self._coming.append(one)

    def remove(self, name: str) -> None:
        """Forget a request whose client has gone, between two steps."""
        for kept in (self._coming, self._waiting, self._running):
            for one in kept:
                if one.request.name == name:
                    kept.remove(one)
                    self._queue.ended(self._queued(one))
                    self._free_blocks += one.blocks
                    self._free_swap += one.swap_bytes
                    return

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting) + len(self._coming)

    @property
    def waiting_tokens(self) -> int:
        """Tokens for which requests hold no blocks yet."""
        waiting = sum(one.tokens for kept in (self._coming, self._waiting) for one in kept)
        return waiting + sum(one.tokens - one.computed for one in self._running if one.prefilling)

    @property
    def kv_usage(self) -> float:
        """Share of blocks that requests hold."""
        return 1 - self._free_blocks / self._limits.blocks

    @property
    def free_swap(self) -> int:
        return self._free_swap

    def staying(self) -> Iterator[StayingRequest]:
        """Requests that can go on elsewhere without losing what is just being computed."""
        for one in (*self._coming, *self._waiting, *self._running):
            waits = one not in self._running
            if waits or not one.prefilling:
                request = one.request
                yield StayingRequest(request.name, one.tokens, waits, request.arrived_s)

    @property
    def due_s(self) -> float | None:
        """Time of the next step: 0 for at once, else the next arrival; None if all have ended."""
        if self._running or self._waiting:
            return 0.0
        return self._coming[0].request.arrived_s if self._coming else None

    def schedule(self, now: float) -> ScheduledStep:
        """Schedule a step that begins now, as vLLM's ``Scheduler.schedule``."""
        while self._coming and self._coming[0].request.arrived_s <= now:
            self._waiting.append(self._coming.popleft())
        self._sort(now)
        step = ScheduledStep(now)
        if made_way := self._make_way(step):
            self._sort(now)
        running, starting = self._allowed(now)
        starting = [one for one in starting if one not in made_way]
        kept = set(running)
        sit_out = [one for one in self._running if one not in kept]
        left = self._go_on(step, running)
        if len(step.preempted) == len(made_way):
            self._start(step, running, starting, left)
        self._nothing_started = bool(sit_out) and not running
        self._running = sit_out + running
        return step

    def end(self, step: ScheduledStep, now: float) -> None:
        """End the step, as vLLM's ``update_from_output``."""
        scheduled = {share.name: share.tokens for share in step.shares}
        for one in self._running:
            tokens = scheduled.get(one.request.name)
            if tokens is None:
                continue
            one.computed += tokens
            one.prefilling = one.computed < one.tokens
            one.generated += not one.prefilling
            if one.generated == one.request.output_tokens:
                self._past_answers.note(one.generated)
                self._queue.ended(self._queued(one))
                self._free_blocks += one.blocks
                assert one.started_s is not None
                self.times[one.request.name] = Times(one.request.arrived_s, one.started_s, now)
        self._running = [one for one in self._running if one.request.name not in self.times]

    def _sort(self, now: float) -> None:
        def key(one: _Progress) -> tuple[object, ...]:
            background = one.request.background
            if self._queue.as_they_came:
                # vLLM's own order is first come, first served.
                return (background,)
            name, arrived_s = one.request.name, one.request.arrived_s
            return background, -self._priority_of(one, now), arrived_s, name

        self._waiting = deque(sorted(self._waiting, key=key))
        self._running.sort(key=key)

    def _make_way(self, step: ScheduledStep) -> list[_Progress]:
        """Preempt background requests for others that wait; returns those."""
        others = [one for one in self._waiting if not one.request.background]
        made_way: list[_Progress] = []
        while others and self._running and self._running[-1].request.background:
            places = self._limits.running - len(self._running)
            needed = self._limits.blocks_for(others[0].tokens + 1)
            if places >= len(others) and self._free_blocks >= needed:
                break
            made_way.append(self._running.pop())
            self._preempt(step, made_way[-1])
        return made_way

    def _priority_of(self, one: _Progress, now: float) -> float:
        return self._queue.priority(self._queued(one), now)

    def _queued(self, one: _Progress) -> QueuedRequest:
        return one.queued(self._costs, timed=self._queue.asks_left_s)

    def _allowed(self, now: float) -> tuple[list[_Progress], list[_Progress]]:
        """Requests that may run in this step, and those that may start in it, in their order."""
        waiting = list(self._waiting)
        if self._policies.preemption == "swap":
            started = [*self._running, *(one for one in waiting if one.swap_bytes)]
            may_start = never_computed_twice(
                (self._candidate(one, now) for one in waiting),
                sum(bool(one.swap_bytes) for one in waiting),
                [self._limits.blocks_for(one.most_tokens) for one in started],
                self._limits.blocks,
                self._limits.swap_bytes // self._limits.block_bytes,
            )
            waiting = [waiting[at] for at in may_start]
        places = self._limits.running - len(self._running)
        if self._policies.preemption == "adaptive" and self._policies.peak_admission:
            # What is swapped out comes back first, or swap space would stay full.
            waiting.sort(key=lambda one: not one.swap_bytes)
            waiting = waiting[: self._fitting(waiting[:places])]
        if self._policies.chunked_recompute:
            return self._running, waiting[:places]
        if prefilling := [one for one in self._running if one.prefilling]:
            return prefilling, []
        candidates = [self._candidate(one, now) for one in waiting]
        chosen = start(candidates, self._free_blocks, places)
        if chosen.prefill and self._nothing_started:
            # It did not fit after all.
            return self._running, []
        starting = [waiting[at] for at in chosen.chosen]
        return ([] if chosen.prefill else self._running), starting

    def _fitting(self, waiting: list[_Progress]) -> int:
        held = sum(one.blocks for one in self._running)
        tokens = self._limits.block_tokens
        return fitting(
            map(self._growing, waiting),
            [self._growing(one) for one in self._running],
            (self._free_blocks + held + self._swap_room(held)) * tokens,
            tokens,
        )

    def _swap_room(self, held: int) -> int:
        """Blocks that swap space takes instead of memory, where that beats computing them again."""
        if not self._running:
            return 0
        tokens = held * self._limits.block_tokens // len(self._running)
        if not self._costs.worth_swapping(tokens):
            return 0
        return self._free_swap // self._limits.block_bytes

    def _growing(self, one: _Progress) -> Growing:
        expected, longest = one.request.expected, one.request.max_tokens
        if expected is None:
            left = self._past_answers.left(one.generated, longest)
        else:
            left = expected.answer(one.generated, longest) - one.generated
        return Growing(one.tokens, left)

    def _candidate(self, one: _Progress, now: float) -> StartCandidate:
        return StartCandidate(
            priority=self._priority_of(one, now),
            blocks=self._limits.blocks_for(one.computed + 1 if one.swap_bytes else one.tokens),
            most_blocks=self._limits.blocks_for(one.most_tokens),
            swapped=one.swap_bytes > 0,
        )

    def _go_on(self, step: ScheduledStep, running: list[_Progress]) -> int:
        """Schedule running requests; returns the tokens that are left of the step."""
        left = self._limits.step_tokens
        at = 0
        while at < len(running) and left:
            one = running[at]
            tokens = min(one.tokens - one.computed, left)
            while self._needed(one, tokens) > self._free_blocks:
                self._preempt(step, running.pop())
                if one.left_by is not None:
                    return left
            self._compute(step, one, tokens)
            left -= tokens
            at += 1
        return left

    def _preempt(self, step: ScheduledStep, one: _Progress) -> None:
        size = self._limits.blocks_for(one.computed) * self._limits.block_bytes
        victim = Victim(
            size, self._costs.swap_s(one.computed), self._costs.recompute_s(one.computed)
        )
        one.left_by = PREEMPTIONS[self._policies.preemption](victim, self._free_swap)
        step.preempted[one.request.name] = one.left_by
        if one.left_by is PreemptionMode.SWAP:
            one.swap_bytes = size
            self._free_swap -= size
            step.swapped_out_bytes += size
        else:
            one.computed = 0
        self._free_blocks += one.blocks
        one.blocks = 0
        self._waiting.appendleft(one)

    def _start(
        self, step: ScheduledStep, running: list[_Progress], starting: list[_Progress], left: int
    ) -> None:
        """Schedule waiting requests with the tokens that are left of the step."""
        for one in starting:
            spare = self._limits.spare_blocks if running else 0
            # Blocks for all its tokens, however few of them this step has room for.
            if not left or self._limits.blocks_for(one.tokens) + spare > self._free_blocks:
                return
            self._waiting.remove(one)
            running.append(one)
            self._come_back(step, one)
            tokens = min(one.tokens - one.computed, left)
            self._compute(step, one, tokens)
            left -= tokens

    def _come_back(self, step: ScheduledStep, one: _Progress) -> None:
        if one.started_s is None:
            one.started_s = step.start_s
            one.computed = one.request.cached_tokens
        if one.left_by is not None:
            step.resumed[one.request.name] = one.left_by
        one.left_by = None
        step.swapped_in_bytes += one.swap_bytes
        self._free_swap += one.swap_bytes
        one.swap_bytes = 0

    def _compute(self, step: ScheduledStep, one: _Progress, tokens: int) -> None:
        needed = self._needed(one, tokens)
        one.blocks += needed
        self._free_blocks -= needed
        step.shares.append(StepShare(one.request.name, one.computed, tokens))

    def _needed(self, one: _Progress, tokens: int) -> int:
        """Blocks that the request needs beyond those it has."""
        return self._limits.blocks_for(one.computed + tokens) - one.blocks
