"""A simulated engine: requests in, steps that take time, outputs out. It reads no clock.

The schedule's simulator decides which requests a step has and who is preempted, by the policies of
real engines; the cost model says how long the step takes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from loomserve.kvstore.server.protocol import HANDED_OVER
from loomserve.platform.costs.step_time import OnlineModel, Step
from loomserve.platform.costs.transfer_time import TransferTimes
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.engine.scheduling.device_time import DeviceTime
from loomserve.platform.scheduling.metrics import SCHEDULING
from loomserve.platform.scheduling.policy.hints import RequestHints
from loomserve.platform.scheduling.policy.preemption import PreemptionMode, StayingRequest
from loomserve.platform.scheduling.simulator import (
    Costs,
    Policies,
    ScheduledStep,
    SimulatedRequest,
    Simulator,
)
from loomserve.platform.simulated.answers import Answer, answer_to
from loomserve.platform.simulated.options import EngineOptions
from loomserve.platform.simulated.wire import (
    MAX_TOKENS,
    EventType,
    Output,
    Outputs,
    Prefill,
    PrefixCacheStats,
    SchedulerStats,
    WireEvent,
    WireRequest,
    logprobs,
)

# Of the tokens that are shown beside the one that was chosen; nobody computed them.
_LOGPROB, _LESS_LIKELY = -0.1, -1.0
_MOST_LOGPROBS = 20


class PrefixCache:
    """Beginnings of prompts that the engine has computed, as keys of blocks.

    It keeps as many as the engine's memory has blocks, and forgets the least recently used first.
    Blocks that requests hold are not taken from it: what it finds is the most that an engine would.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self._blocks, self._block_tokens = blocks, block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()

    def keys(self, tokens: Sequence[int], own: object) -> list[int]:
        """Keys of a prompt's whole blocks; prompts that differ in ``own`` have none in common."""
        key, keys, size = hash(own), [], self._block_tokens
        for begin in range(0, len(tokens) - len(tokens) % size, size):
            key = hash((key, *tokens[begin : begin + size]))
            keys.append(key)
        return keys

    def cached(self, keys: Sequence[int]) -> int:
        """Tokens of these blocks that need not be computed, from the first on."""
        found = list(takewhile(self._known.__contains__, keys))
        self.add(found)
        return len(found) * self._block_tokens

    def add(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()


@dataclass(slots=True)
class HeldRequest:
    request: WireRequest
    client: int
    answer: Answer
    keys: list[int]
    """Of its prompt's blocks."""
    cached: int
    handed_over: int
    given: int
    """Tokens of its answer so far, those of another engine among them."""
    resumed: int
    """Those alone."""
    events: list[WireEvent] = field(default_factory=list)
    began: bool = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids or ()) + self.given

    @property
    def num_output_tokens(self) -> int:
        return self.given


class SimulatedEngine:
    """Requests of any clients; times are monotonic seconds."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        limits, given, policies = options.limits, options.simulated, options.scheduling
        self.requests: dict[str, HeldRequest] = {}
        self._device_time = DeviceTime()
        kept = limits.blocks if options.prefix_caching else 0
        self._prefixes = PrefixCache(kept, limits.block_tokens)
        self._looked_up = PrefixCacheStats()
        self._preemptions: Counter[str] = Counter()
        self._swap_times = TransferTimes.unprofiled()
        in_ms = (
            given.step_ms,
            given.token_ms,
            given.request_ms,
            given.context_token_ms,
            given.attention_pair_ms,
        )
        times = OnlineModel.known([each / 1000 for each in in_ms])
        self._step: ScheduledStep
        self._took_s = 0.0
        self._costs = Costs(
            swap_s=self._swap_s,
            recompute_s=lambda tokens: times.prefill_s(tokens, limits.step_tokens),
            step_s=lambda step: (
                times.seconds(Step.of((each.computed, each.tokens) for each in step.shares))
                + self._swap_times.out.seconds(step.swapped_out_bytes)
                + self._swap_times.into.seconds(step.swapped_in_bytes)
            ),
            token_s=times.seconds(Step(1, 1, 0, 0.0)),
        )
        self._schedule = Simulator(
            (),
            limits,
            Policies(
                policies.queue,
                policies.preemption,
                policies.chunked_recompute,
                policies.peak_admission,
                policies.queue_options,
            ),
            self._costs,
        )

    def _swap_s(self, tokens: int) -> float:
        limits = self._options.limits
        size = limits.blocks_for(tokens) * limits.block_bytes
        return self._swap_times.out.seconds(size) + self._swap_times.into.seconds(size)

    @property
    def is_idle(self) -> bool:
        return not self.requests

    @property
    def load(self) -> tuple[int, int, float]:
        """Requests that run, those that wait, and the share of KV memory that they hold."""
        schedule = self._schedule
        return schedule.running, schedule.waiting, schedule.kv_usage

    @property
    def waiting_tokens(self) -> int:
        """Tokens for which requests hold no memory yet."""
        return self._schedule.waiting_tokens

    def add(self, request: WireRequest, client: int, now: float) -> HeldRequest:
        """Take in a request; raises ``ValueError`` if the engine cannot answer it."""
        params, prompt = request.sampling_params, request.prompt_token_ids
        if params is None or not prompt or params.get("structured_outputs"):
            raise ValueError("a simulated engine answers prompts of tokens, and follows no grammar")
        extra: Mapping[str, Any] = params.get("extra_args") or {}
        resumed = len(extra.get(RESUMED) or ())
        options = self._options
        answer = answer_to(
            request,
            seed=options.simulated.seed,
            mean_tokens=options.simulated.answer_tokens,
            longest=options.max_model_len - len(prompt),
        )
        left = len(answer.tokens) - resumed
        if left < 1:
            raise ValueError(f"{resumed} tokens leave nothing to answer")
        handed_over = (extra.get("kv_transfer_params") or {}).get(HANDED_OVER, 0)
        keys = self._prefixes.keys(prompt, (request.cache_salt, str(request.lora_request)))
        cached = min(self._prefixes.cached(keys), len(prompt) - 1)
        one = HeldRequest(request, client, answer, keys, cached, handed_over, resumed, resumed)
        hints = RequestHints.of(extra)
        deadline_s = hints.deadline_s if options.scheduling.deadlines else None
        self._schedule.add(
            SimulatedRequest(
                name=request.request_id,
                arrived_s=now,
                prompt_tokens=len(prompt) + resumed,
                output_tokens=left,
                max_tokens=max(left, (params.get("max_tokens", MAX_TOKENS) or left) - resumed),
                # On its way it has the seconds that are left.
                deadline_s=None if deadline_s is None else now + deadline_s,
                expected=hints.expected,
                cached_tokens=max(cached, min(handed_over, len(prompt) + resumed - 1)),
                background=hints.background,
            )
        )
        self._looked_up.requests += 1
        self._looked_up.queries += len(prompt)
        self._looked_up.hits += cached
        if not resumed:
            one.events.append(WireEvent(EventType.QUEUED, now))
        self.requests[request.request_id] = one
        return one

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if self.requests.pop(request_id, None) is not None:
                self._schedule.remove(request_id)
                self._device_time.ended(request_id)

    def staying(self) -> Iterator[StayingRequest]:
        """Requests that can go on elsewhere without losing what is just being computed."""
        return self._schedule.staying()

    def reset_prefix_cache(self) -> None:
        self._prefixes.clear()

    def begin(self, now: float) -> float | None:
        """Begin a step; returns its seconds, or None: nothing can be computed."""
        self._step = step = self._schedule.schedule(now)
        for name, mode in step.preempted.items():
            self.requests[name].events.append(WireEvent(EventType.PREEMPTED, now))
            swapped = mode is PreemptionMode.SWAP
            self._preemptions["swapped_out" if swapped else "recomputed"] += 1
        for mode in step.resumed.values():
            self._preemptions["swapped_in"] += mode is PreemptionMode.SWAP
        for share in step.shares:
            one = self.requests[share.name]
            if not one.began or share.name in step.resumed:
                one.began = True
                one.events.append(WireEvent(EventType.SCHEDULED, now))
        if not step.shares:
            return None
        self._took_s = self._costs.step_s(step)
        return self._took_s

    def end(self, now: float) -> dict[int, Outputs]:
        """End the step that was begun; its outputs by client."""
        step, there = self._step, self.requests
        self._device_time.step(
            {each.name: each.tokens for each in step.shares}, self._took_s, there
        )
        answered = [
            there[each.name]
            for each in step.shares
            if each.computed + each.tokens >= there[each.name].num_tokens
        ]
        self._schedule.end(step, now)
        outputs: dict[int, Outputs] = defaultdict(Outputs)
        for one in answered:
            outputs[one.client].outputs.append(self._output(one))
        if not outputs:
            outputs[0] = Outputs()
        self._device_time.tell(outputs.values())
        next(iter(outputs.values())).scheduler_stats = self.stats()
        return outputs

    def _output(self, one: HeldRequest) -> Output:
        answer, first = one.answer, one.given == one.resumed
        output = Output(one.request_id, [answer.tokens[one.given]])
        one.given += 1
        if first:
            self._prefixes.add(one.keys)
            if not one.resumed or one.handed_over:
                output.prefill_stats = self._prefill(one)
        if one.events:
            output.events, one.events = one.events, []
        asked = (one.request.sampling_params or {}).get("logprobs")
        if asked is not None:
            output.new_logprobs = self._logprobs(output.new_token_ids[0], asked)
        if one.given == len(answer.tokens):
            output.finish_reason, output.stop_reason = answer.reason, answer.stop_token
            self._schedule.times.pop(one.request_id)
            self._device_time.ended(one.request_id)
            del self.requests[one.request_id]
        return output

    def _prefill(self, one: HeldRequest) -> Prefill:
        prompt = len(one.request.prompt_token_ids or ())
        cached = max(one.cached, min(one.handed_over, prompt))
        return Prefill(prompt, prompt - cached, cached, one.cached, cached - one.cached)

    def _logprobs(self, token: int, asked: int) -> tuple[Any, ...]:
        count = min(asked if asked >= 0 else _MOST_LOGPROBS, _MOST_LOGPROBS)
        others = [each for each in range(count + 1) if each != token][: max(0, count - 1)]
        tokens = [token, token, *others] if count else [token]
        values = [_LOGPROB, _LOGPROB, *(_LESS_LIKELY - at for at in range(len(others)))]
        return logprobs(tokens, values[: len(tokens)])

    def stats(self) -> SchedulerStats:
        running, waiting, usage = self.load
        looked_up, self._looked_up = self._looked_up, PrefixCacheStats()
        told = {SCHEDULING: self._scheduling()} if self._options.with_store else None
        return SchedulerStats(running, waiting, usage, looked_up, told)

    def _scheduling(self) -> dict[str, Any]:
        options, count = self._options.scheduling, self._preemptions
        return {
            "queue": options.queue,
            "preemption": options.preemption,
            "swapped_out": count["swapped_out"],
            "swapped_in": count["swapped_in"],
            "recomputed": count["recomputed"],
            "swap_used_bytes": options.swap_bytes - self._schedule.free_swap,
            "swap_capacity_bytes": options.swap_bytes,
            "step_time_error": None,
            "swap_time_error": None,
        }
