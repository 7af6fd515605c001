"""Which waiting requests may start in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from vllm.v1.request import Request

from loomserve.platform.engine.scheduling.costs import EngineCosts
from loomserve.platform.engine.scheduling.order import QueueOrder
from loomserve.platform.engine.scheduling.step_hooks import HookedScheduler
from loomserve.platform.engine.scheduling.swap_space import SwapSpace
from loomserve.platform.scheduling.options import SchedulerOptions
from loomserve.platform.scheduling.policy.admission import (
    Growing,
    PastAnswers,
    StartCandidate,
    fitting,
    never_computed_twice,
    start,
)


class Admission:
    """Holds waiting requests back though a place is free, where the options ask for it."""

    def __init__(
        self, engine: HookedScheduler, order: QueueOrder, swap: SwapSpace, costs: EngineCosts
    ) -> None:
        self.nothing_started = False
        """Whether in the last step no prompt was computed though running requests sat it out."""
        self._engine = engine
        self._order = order
        self._swap = swap
        self._costs = costs

    def use(self, options: SchedulerOptions, *, foresees: bool) -> None:
        """Decide by these options; ``foresees``: by how much requests will grow, too."""
        self._options = options
        self._foresees = foresees
        self._past_answers = PastAnswers()

    def on_answer(self, tokens: int) -> None:
        self._past_answers.note(tokens)

    @property
    def restricts(self) -> bool:
        """Whether some requests may have to wait, or to sit a step out, though a place is free."""
        options, engine = self._options, self._engine
        if not options.chunked_recompute:
            return True
        if self._foresees:
            # With no place for any, vLLM starts none.
            return bool(engine.waiting) and (self._places > 0 or bool(engine.blocked))
        return options.preemption == "swap" and bool(engine.waiting)

    def chosen(
        self, now: float, made_way: AbstractSet[Request]
    ) -> tuple[list[Request], list[Request]]:
        """Waiting requests that may start, in order; and running ones that sit the step out.
        ``made_way`` have just left their places to others, and do not start again: a request that
        resumes in the step that preempts it may be given its tokens out of order."""
        blocked = self._engine.blocked
        may_start, sit_out = self._admissible(now, {*made_way, *blocked}), list[Request]()
        if not self._options.chunked_recompute:
            may_start, sit_out = self._apart(may_start, now)
        # vLLM has to see these to learn that their grammar is there.
        return [*blocked, *may_start], sit_out

    def most_blocks(self, request: Request) -> int:
        tokens = min(request.num_prompt_tokens + request.max_tokens, self._engine.max_model_len)
        return self._costs.blocks(tokens)

    def free_blocks(self) -> int:
        return int(self._engine.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def _places(self) -> int:
        return self._engine.most_running - len(self._engine.running)

    def _admissible(self, now: float, not_now: AbstractSet[Request]) -> list[Request]:
        queue, places = self._engine.waiting, max(0, self._places)
        most = len(queue)
        if self._foresees and self._options.chunked_recompute:
            # The first ones do, and each takes a block at least.
            most = min(places, self.free_blocks())
        waiting = list(islice((each for each in queue if each not in not_now), most))
        if self._options.preemption == "swap":
            chosen = never_computed_twice(
                (self._candidate(request, now) for request in waiting),
                sum(request.request_id in self._swap for request in waiting),
                [self.most_blocks(request) for request in self._started()],
                self._usable_blocks,
                self._swap.most_blocks,
            )
            return [waiting[at] for at in chosen]
        return waiting[: self._fitting(waiting[:places])] if self._foresees else waiting

    def _apart(self, waiting: list[Request], now: float) -> tuple[list[Request], list[Request]]:
        """The same where prompts have steps of their own."""
        running = self._engine.running
        if any(request.is_prefill_chunk for request in running):
            return [], [request for request in running if not request.is_prefill_chunk]
        starting = start(
            [self._candidate(request, now) for request in waiting], self.free_blocks(), self._places
        )
        if starting.prefill and self.nothing_started:
            # It did not fit after all.
            return [], []
        return [waiting[at] for at in starting.chosen], list(running) if starting.prefill else []

    def _fitting(self, waiting: Sequence[Request]) -> int:
        """How many of them memory is expected to have room for until all have ended."""
        if not waiting:
            return 0
        started = [*self._engine.running, *self._loading()]
        held = sum(self._costs.blocks(request.num_computed_tokens) for request in started)
        blocks = self.free_blocks() + held + self._swap.blocks_instead(held, len(started))
        return fitting(
            (self._growing(each, self._shared_tokens(each)) for each in waiting),
            [self._growing(request, 0) for request in started],
            blocks * self._costs.block_size,
            self._costs.block_size,
        )

    def _growing(self, request: Request, shared: int) -> Growing:
        generated, longest = request.num_output_tokens, request.max_tokens
        expected, _, background = self._order.hints(request)
        if expected is None:
            left = self._past_answers.left(generated, longest)
        else:
            left = expected.answer(generated, longest) - generated
        return Growing(request.num_tokens - shared, left, background)

    def _shared_tokens(self, request: Request) -> int:
        """Tokens of the request's beginning whose KV running requests hold anyway."""
        blocks, _, _ = self._engine.kv_cache_manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        shared: int = sum(block.ref_cnt > 0 for block in blocks[0]) * self._costs.block_size
        return shared

    def _candidate(self, request: Request, now: float) -> StartCandidate:
        swapped = self._swap.tokens_of(request.request_id)
        tokens = request.num_tokens if swapped is None else swapped + 1
        return StartCandidate(
            priority=self._order.priority(request, now),
            blocks=self._costs.blocks(tokens),
            most_blocks=self.most_blocks(request),
            swapped=swapped is not None,
        )

    def _started(self) -> Iterator[Request]:
        """Requests whose KV is in the engine's memory, or in swap space, or between the two."""
        yield from self._engine.running
        yield from self._loading()
        yield from (self._engine.requests[name] for name in self._swap)

    def _loading(self) -> list[Request]:
        return [each for each in self._engine.deferred if each.num_computed_tokens]

    @property
    def _usable_blocks(self) -> int:
        return int(self._engine.kv_cache_manager.block_pool.num_gpu_blocks) - 1
