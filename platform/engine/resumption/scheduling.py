"""The scheduler's half: such a request enters as one that was preempted, and is resumed.

So all that depends on an answer's length or on its tokens is as in a run that nothing disturbed:
``max_tokens``, ``min_tokens``, penalties, stop tokens, the grammar. Its KV is looked up, in the
prefix cache and in the KV store, over the prompt and the tokens so far.
"""

from __future__ import annotations

import logging

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from loomserve.kvstore.engine.request_keys import handed_over_tokens
from loomserve.platform.engine.resumption.travelling import resumed_tokens

_logger = logging.getLogger(__name__)


class ResumedRequests:
    """Requests that go on here, until a worker knows them."""

    def __init__(self, grammars: StructuredOutputManager) -> None:
        self._grammars = grammars
        self._entering: dict[str, Request] = {}

    def enter(self, request: Request) -> bool:
        """Give a request that is being added its tokens so far; returns whether it has any."""
        tokens = resumed_tokens(request.sampling_params)
        if not tokens:
            return False
        request.append_output_token_ids(tokens)
        request.num_preemptions = 1
        if not handed_over_tokens(request):
            # The front end has been told of its first prefill, by another engine.
            request.prefill_stats = None
        self._entering[request.request_id] = request
        return True

    def promoted(self, request: Request, waited_for: RequestStatus) -> bool:
        """Let a request run that waits no longer; False: its grammar refuses its tokens so far."""
        if request.request_id not in self._entering:
            return True
        # vLLM takes one that has been preempted for one that the workers know.
        request.status = RequestStatus.WAITING
        if waited_for is not RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR:
            return True
        if self._advance(request):
            return True
        request.status = waited_for
        return False

    def started(self, scheduled: SchedulerOutput) -> None:
        """The workers are told of those that this step starts."""
        if not self._entering:
            return
        for new in scheduled.scheduled_new_reqs:
            request = self._entering.pop(new.req_id, None)
            if request is not None and request.prefill_stats is not None:
                _tell_prefill(request, new.num_computed_tokens)

    def forget(self, request: Request) -> None:
        self._entering.pop(request.request_id, None)

    def _advance(self, request: Request) -> bool:
        """Advance the grammar over the tokens so far, but for those of reasoning."""
        accepted: bool = self._grammars.accept_tokens(request, list(request.output_token_ids))
        if not accepted:
            _logger.error("request %s does not follow its grammar", request.request_id)
        return accepted


def _tell_prefill(request: Request, computed: int) -> None:
    """Say what another engine has left to compute of the prompt that it has handed over. vLLM says
    that of requests which have not been preempted. Those in the store and those in the prefix cache
    are not told apart."""
    prompt = request.num_prompt_tokens
    request.prefill_stats.set(
        num_prompt_tokens=prompt,
        num_local_cached_tokens=0,
        num_external_cached_tokens=min(computed, prompt),
    )
