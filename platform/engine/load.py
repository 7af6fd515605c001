"""An engine's own measurement of its load, taken in after every step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from loomserve.platform.costs.engine_work import EngineWork
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.state import Pace, ReplicaLoad, SchedulingState, WorkState

# Weight of the newest step or request in the moving means: about the last twenty count.
_NEWEST = 0.1
# Two statistics further apart than this do not frame one step: the engine was idle between them.
_LONGEST_STEP_S = 5.0


class StepTokens(NamedTuple):
    """Tokens of one step.

    Attributes:
        generated: Generated tokens, first ones included.
        computed: Tokens of the prompts that the step completed, but for cached ones.
        first_token_s: The longest that a first token of this step has let wait; 0 for none.
    """

    generated: int = 0
    computed: int = 0
    first_token_s: float = 0.0


class ServedRequest(NamedTuple):
    """A request that has its whole answer; seconds in the engine.

    Attributes:
        prompt_tokens: Those of its prompt.
        cached_tokens: Those of them that were not computed.
        generated: Those of its answer.
        prefill_s: From its start to its first token.
        decode_s: From its first token to its last.
        inference_s: From its start to its last token.
    """

    prompt_tokens: int
    cached_tokens: int
    generated: int
    prefill_s: float
    decode_s: float
    inference_s: float


class LoadMeter:
    """The latest load of one engine; ``read`` may be called at any time, by the same thread."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, most_running: int | None = None
    ) -> None:
        """``most_running`` is that of :class:`EngineWork`."""
        self._clock = clock
        self._running = 0
        self._waiting = 0
        self._kv_cache_usage = 0.0
        self._step_time_s = 0.0
        self._last_step_at: float | None = None
        self._scheduling: dict[str, Any] | None = None
        self._served = _Means()
        self._work = EngineWork(most_running)

    def step(
        self,
        running: int,
        waiting: int,
        kv_cache_usage: float,
        now: float,
        tokens: StepTokens | None = None,
    ) -> None:
        """Take in one step's statistics; ``now`` is monotonic seconds."""
        last, self._last_step_at = self._last_step_at, now if running else None
        if tokens is not None:
            # After an idle while, the first answers waited for nothing but this step.
            self._work.step(
                min(tokens.first_token_s if last is None else now - last, _LONGEST_STEP_S),
                running=running,
                generated=tokens.generated,
                computed=tokens.computed,
                kv_usage=kv_cache_usage,
            )
        if last is not None and 0 < now - last < _LONGEST_STEP_S:
            took = now - last
            mean = self._step_time_s
            self._step_time_s = took if mean == 0 else mean + _NEWEST * (took - mean)
        self._running, self._waiting, self._kv_cache_usage = running, waiting, kv_cache_usage

    def scheduled(self, figures: dict[str, Any]) -> None:
        """Take in what the engine's own scheduler says of itself: a :class:`SchedulingState`."""
        self._scheduling = figures

    def finished(self, request: ServedRequest) -> None:
        """Take in what was measured of a request that has ended."""
        self._served.take(
            prefill_s=request.prefill_s,
            computed=max(1, request.prompt_tokens - request.cached_tokens),
            decode_s=request.decode_s,
            # The first token comes with the prefill.
            decoded=max(0, request.generated - 1),
            request_s=request.inference_s,
        )

    def read(self, turnaround: Turnaround) -> ReplicaLoad:
        scheduling = self._scheduling
        return ReplicaLoad(
            running=self._running,
            waiting=self._waiting,
            kv_cache_usage=self._kv_cache_usage,
            step_time_s=self._step_time_s,
            oldest_waiting_s=turnaround.oldest_waiting_s(self._clock()),
            weighted_turnaround=turnaround.mean_weighted_turnaround,
            pace=self._served.pace,
            scheduling=SchedulingState.model_validate(scheduling) if scheduling else None,
            work=WorkState(
                prefill_s=self._work.prefill_s,
                attention_s=self._work.attention_s,
                linear_s=self._work.linear_s,
                tokens=self._work.tokens,
            ),
            measured_at=self._clock(),
        )


class _Means:
    """Moving means of requests that have ended; their ratios weigh long ones as they count."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def take(self, **measured: float) -> None:
        for name, value in measured.items():
            mean = self._means.setdefault(name, value)
            self._means[name] = mean + _NEWEST * (value - mean)

    @property
    def pace(self) -> Pace | None:
        means = self._means
        if not means.get("decoded"):
            return None
        return Pace(
            prefill_token_s=means["prefill_s"] / means["computed"],
            output_token_s=means["decode_s"] / means["decoded"],
            request_s=means["request_s"],
        )
