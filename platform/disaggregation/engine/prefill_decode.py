"""vLLM's front end for both sides of disaggregation: computes prompts for, or at, another engine.

The decode side takes a request as any engine does: its own front end parses, tokenises and later
detokenises. Before the request enters EngineCore, it goes to a prefill engine, whose first token
the client gets. EngineCore then continues from prompt and first token, and its connector
loads their KV from the store. The client's stream is one from beginning to end.

If no prefill engine answers, or the store lacks the blocks that it saved, this engine computes the
prompt itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from prometheus_client import REGISTRY
from vllm.v1.engine import (
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats

from loomserve.platform.config import LOCAL_PROMPT_TOKENS
from loomserve.platform.disaggregation.engine.handoff import (
    Handoff,
    after_first_token,
    decode,
    encode,
    first_token_only,
    on_our_clock,
    usable,
    with_kv_from_store,
)
from loomserve.platform.disaggregation.metrics import HandoffMetrics
from loomserve.platform.engine.turnaround import Turnaround
from loomserve.platform.requests.engine.grammar_checks import GrammarCheckingLLM
from loomserve.platform.scheduling import metrics as scheduling
from loomserve.platform.state.roles import PrefillAwayError

# Like vLLM's own, they are in the default registry of the engine's process.
_METRICS = HandoffMetrics(REGISTRY)

RemotePrefill = Callable[[bytes, int], Awaitable[bytes]]
"""Sends an encoded request and its number of prompt tokens to another engine's ``prefill``.

Raises :class:`PrefillAwayError` if there is no prefill engine, or if it fails."""


class PrefillDecodeLLM(GrammarCheckingLLM):
    """vLLM's engine front end; it hands prompts over while ``remote`` is set."""

    remote: RemotePrefill | None = None
    local_prompt_tokens = LOCAL_PROMPT_TOKENS
    output_processor: FirstOutputs

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._handing_over: dict[str, asyncio.Task[None]] = {}
        self.turnaround = turnaround = Turnaround()
        scheduling.OLDEST_WAITING.set_function(
            lambda: turnaround.oldest_waiting_s(time.monotonic())
        )
        super().__init__(*args, **kwargs)

    def _run_output_handler(self) -> None:
        if self.output_handler is None:
            # vLLM's handler holds on to the output processor from here on.
            self.output_processor = FirstOutputs(self.output_processor, self.turnaround)
        super()._run_output_handler()

    # The prefill side

    async def prefill(self, message: bytes) -> bytes:
        """Compute a prompt and its first token for a decode engine.

        Args:
            message: its EngineCoreRequest, encoded.

        Returns:
            The EngineCoreOutput, encoded.
        """
        request: EngineCoreRequest = decode(message, EngineCoreRequest)
        request_id = request.request_id
        self._run_output_handler()
        queue = RequestOutputCollector(request.params.output_kind, request_id)
        first = self.output_processor.awaited[request_id] = []
        try:
            await super()._add_request(request, None, None, 0, queue)
            await queue.get()  # raises what the engine raised
        except asyncio.CancelledError:
            await self.abort(request_id, internal=True)
            raise
        finally:
            del self.output_processor.awaited[request_id]
        return encode(first[0])

    # The decode side

    async def _add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None,
        index: int,
        queue: RequestOutputCollector,
    ) -> None:
        remote = self.remote
        handoff = self._handoff(request) if remote is not None else Handoff.LOCAL
        if remote is None or handoff is Handoff.LOCAL:
            await super()._add_request(request, prompt, parent_req, index, queue)
            return
        if parent_req is None:
            self.check_admission(request_id=request.request_id)
        self.output_processor.add_request(request, prompt, parent_req, index, queue)
        task = asyncio.create_task(self._hand_over(request, handoff, remote, queue))
        self._handing_over[request.request_id] = task
        task.add_done_callback(lambda _: self._handing_over.pop(request.request_id))

    def _handoff(self, request: EngineCoreRequest) -> Handoff:
        handoff = Handoff.LOCAL
        if len(request.prompt_token_ids or ()) > self.local_prompt_tokens:
            handoff = usable(request)
        if handoff is Handoff.LOCAL:
            _METRICS.prompt(Handoff.LOCAL)
        return handoff

    async def _hand_over(
        self,
        request: EngineCoreRequest,
        handoff: Handoff,
        remote: RemotePrefill,
        queue: RequestOutputCollector,
    ) -> None:
        try:
            first = await self._prefill_elsewhere(remote, request)
            _METRICS.prompt(handoff if first else "prefill_away")
            rest = self._take_over(request, handoff, first) if first else request
            if rest is not None:
                await self._decode_here(rest)
        except Exception as error:  # whoever waits for the request shall know
            queue.put(error)

    async def _prefill_elsewhere(
        self, remote: RemotePrefill, request: EngineCoreRequest
    ) -> EngineCoreOutput | None:
        """A prefill engine's first output, once the KV is in the store; None: it is away."""
        sent_at = time.monotonic()
        try:
            answer = await remote(encode(first_token_only(request)), len(request.prompt_token_ids))
        except PrefillAwayError:
            return None
        output: EngineCoreOutput = decode(answer, EngineCoreOutput)
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return None
        return on_our_clock(output, sent_at)

    def _take_over(
        self, request: EngineCoreRequest, handoff: Handoff, first: EngineCoreOutput
    ) -> EngineCoreRequest | None:
        """The rest of the request, for this engine; None if the first token was the last."""
        if handoff is Handoff.KV:
            self.output_processor.handed_over(request.request_id, first, seen=False)
            return with_kv_from_store(request)
        if first.finish_reason is FinishReason.LENGTH and not self._full_after_one(request):
            first.finish_reason = None
        # vLLM's output handler passes it on as if EngineCore had sent it.
        self.engine_core.outputs_queue.put_nowait(EngineCoreOutputs(outputs=[first]))
        if first.finished:
            return None
        self.output_processor.handed_over(request.request_id, first, seen=True)
        return after_first_token(request, first.new_token_ids)

    def _full_after_one(self, request: EngineCoreRequest) -> bool:
        longest: int = self.model_config.max_model_len
        return request.params.max_tokens == 1 or len(request.prompt_token_ids) + 1 >= longest

    async def _decode_here(self, request: EngineCoreRequest) -> None:
        await self.engine_core.add_request_async(request)
        if not self.output_processor.has_request(request.request_id):
            # A stop string in its first token, or its client, has ended it meanwhile.
            await self.engine_core.abort_requests_async([request.request_id])

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        await super().abort(request_id, internal)
        for handed_over, task in list(self._handing_over.items()):
            if not self.output_processor.has_request(handed_over):
                task.cancel()


class _HandedOver(NamedTuple):
    first: EngineCoreOutput
    seen: bool
    at: float


class FirstOutputs(OutputProcessor):  # type: ignore[misc]
    """vLLM's output processor; keeps the first outputs that decode engines wait for.

    It also records the events of all requests in ``turnaround``.
    """

    def __init__(self, stock: OutputProcessor, turnaround: Turnaround) -> None:
        super().__init__(
            stock.tokenizer,
            log_stats=stock.log_stats,
            stream_interval=stock.stream_interval,
            tracing_enabled=stock.tracing_enabled,
        )
        self.awaited: dict[str, list[EngineCoreOutput]] = {}
        """Outputs by request id, which :meth:`PrefillDecodeLLM.prefill` sends to decode engines."""
        self._handed_over: dict[str, _HandedOver] = {}
        self._turnaround = turnaround

    def handed_over(self, request_id: str, first: EngineCoreOutput, *, seen: bool) -> None:
        """Note that a prefill engine has just computed the prompt of a request that continues here.

        Args:
            request_id: the request.
            first: what the prefill engine answered.
            seen: whether ``first`` passes :meth:`process_outputs`.
        """
        self._handed_over[request_id] = _HandedOver(first, seen, time.monotonic())

    def add_request(self, request: EngineCoreRequest, *args: Any, **kwargs: Any) -> None:
        self._turnaround.arrived(request.request_id, time.monotonic())
        super().add_request(request, *args, **kwargs)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> Any:
        for output in engine_core_outputs:
            if (kept := self.awaited.get(output.request_id)) is not None:
                kept.append(output)
            elif (handed := self._handed_over.get(output.request_id)) is not None:
                self._goes_on(handed, output)
            self._note(output)
        return super().process_outputs(engine_core_outputs, engine_core_timestamp, iteration_stats)

    def _goes_on(self, handed: _HandedOver, output: EngineCoreOutput) -> None:
        if output is handed.first:
            return
        del self._handed_over[output.request_id]
        _METRICS.went_on(time.monotonic() - handed.at)
        stats: PrefillStats | None = output.prefill_stats
        if stats is not None:
            _METRICS.prompt_tokens(stats.num_cached_tokens, stats.num_computed_tokens)
        if output.events:
            # It waits and starts for the first time at the prefill engine, and that counts.
            before = [] if handed.seen else handed.first.events or []
            here = [e for e in output.events if e.type is not EngineCoreEventType.QUEUED]
            output.events = [*before, *here]

    def _note(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        self._turnaround.answered(request_id)
        for event in output.events or ():
            if event.type is EngineCoreEventType.SCHEDULED:
                self._turnaround.scheduled(request_id, event.timestamp)
            elif event.type is EngineCoreEventType.PREEMPTED:
                self._turnaround.preempted(request_id)

    def update_scheduler_stats(self, scheduler_stats: SchedulerStats | None) -> None:
        super().update_scheduler_stats(scheduler_stats)
        if scheduler_stats is not None:
            self._turnaround.step(
                scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            )

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        aborted: list[str] = super().abort_requests(request_ids, internal)
        for request_id in aborted:
            self._handed_over.pop(request_id, None)
            self._turnaround.left(request_id)
        return aborted

    def _finish_request(self, req_state: Any) -> None:
        self._handed_over.pop(req_state.request_id, None)
        finished = self._turnaround.finished(req_state.request_id, time.monotonic())
        if finished is not None:
            scheduling.WEIGHTED_TURNAROUND.observe(finished.weighted_turnaround)
            scheduling.REQUEST_PREEMPTIONS.observe(finished.preemptions)
        super()._finish_request(req_state)
