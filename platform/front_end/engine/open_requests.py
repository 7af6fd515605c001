"""A front end's open requests: what each was, what it has got, and what is left to ask for."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import msgspec
from vllm.v1.engine import EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason

from loomserve.platform.disaggregation.engine.handoff import first_token_only, with_kv_from_store
from loomserve.platform.engine.core.departures import asked_to
from loomserve.platform.engine.resumption.travelling import RESUMED
from loomserve.platform.engine.scheduling.device_time import take_device_s
from loomserve.platform.front_end.policy.continuation import (
    BLAMED,
    AnswerLimits,
    Death,
    Loss,
    RequestView,
    ending,
)
from loomserve.platform.front_end.request_spans import RequestSpans
from loomserve.platform.front_end.routing import RoutingContext, RoutingRequest
from loomserve.platform.requests.usage import ComputedTokens

_DIGEST_BYTES = 16
# Of extra_args that say when and how urgently a request was sent, not what was.
_HINTS = "loomserve_"
# vLLM's beam search is a request for each token of each beam, with what the beam has as its prompt.
_BEAM = re.compile(r"-[0-9a-f]+-beam-\d+$")
_FIRST_TOLD = (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)


class ChosenReplica(NamedTuple):
    """A replica that has been chosen for a request, and what it was chosen by."""

    replica_id: str
    routing: RoutingRequest


@dataclass(eq=False)
class OpenRequest:
    """A request that has not ended; times are monotonic seconds."""

    request: EngineCoreRequest
    context: RoutingContext | None = None
    tokens: list[int] = field(default_factory=list)
    replica_id: str | None = None
    routing: RoutingRequest | None = None
    answers: ChosenReplica | None = None
    """The replica that answers it, while another one computes its prompt."""
    handed_over: int = 0
    """Tokens that it had when the replica that computed its prompt handed it over; else 0."""
    handed_over_by: str = ""
    """The node whose store has those tokens' KV, where there are several."""
    handed_over_at: float | None = None
    """When that was, until the next token."""
    attempt: int = 0
    lost: Loss | None = None
    """Why it left its last replica, or has to leave the one it is with."""
    placed_at: int = 0
    """Tokens that it had when its replica got it."""
    deaths: list[Death] = field(default_factory=list)
    ended_with: set[str] = field(default_factory=set)
    """Ids of replicas that ended or stood still with it."""
    moves: int = 0
    wanted_at: str | None = None
    """The replica with which its engine would have it go on."""
    waiting_since: float | None = None
    last_token_at: float | None = None
    paused_since: float | None = None
    computed: ComputedTokens = field(default_factory=ComputedTokens)
    spans: RequestSpans | None = None
    """Its spans; None: its HTTP request is not traced."""
    trace_headers: Mapping[str, str] | None = None
    """What vLLM places its own span of it by."""
    _noted: int = -1

    @property
    def id(self) -> str:
        return str(self.request.request_id)

    @property
    def prompt_id(self) -> str:
        """The id that answers to one prompt share, and the beams of its search."""
        return _BEAM.sub("", str(self.request.external_req_id or self.id))

    @property
    def wire_id(self) -> str:
        """The id that engines know it by, another at each attempt."""
        return f"{self.id}#{self.attempt}" if self.attempt else self.id

    @property
    def view(self) -> RequestView:
        return RequestView(
            placed=self.replica_id is not None,
            tokens=len(self.tokens),
            deaths=self.deaths,
            moves=self.moves,
            waiting_since=self.waiting_since,
            carried_on=self.context is None or self.context.carried_on,
        )

    def begin(self) -> None:
        """Take out what is not for engines."""
        # Only this front end says which tokens an answer has; clients may write extra_args.
        params = self.request.sampling_params
        if params is not None and RESUMED in (params.extra_args or {}):
            params.extra_args = {
                key: value for key, value in params.extra_args.items() if key != RESUMED
            }
        # Engines would send it back with each token.
        self.trace_headers, self.request.trace_headers = self.request.trace_headers, None
        if self.context is not None and self.context.trace is not None:
            self.spans = RequestSpans(self.context.trace, self.id)

    def note_loss(self, lost: Loss) -> bool:
        """Remember why it leaves; whether it may have caused that, noted for the first time."""
        self.lost = lost
        if lost not in BLAMED or self.replica_id is None:
            return False
        if self._noted == self.attempt:
            if self.deaths[-1].ended or lost is not Loss.GONE:
                return False
            self.deaths.pop()
        self._noted = self.attempt
        given = len(self.tokens) - self.placed_at
        self.deaths.append(Death(len(self.tokens), given, ended=lost is Loss.GONE))
        self.ended_with.add(self.replica_id)
        return True

    def place(self, chosen: ChosenReplica, steps: Callable[[], int]) -> None:
        self.replica_id, self.routing = chosen
        if self.context is not None:
            self.context.engines[self.id] = lambda: (
                None if self.attempt and len(self.tokens) == self.placed_at else steps()
            )
        self.waiting_since = None
        if self.spans is not None:
            prompt_only = self.answers is not None
            self.spans.begin(self.replica_id, prompt_only=prompt_only, attempt=self.attempt)

    def end(self, *, cut_off: bool) -> None:
        """Leave the last replica and add what engines computed to the HTTP request's usage;
        ``cut_off``: nothing in its answer has ended it."""
        if self.context is not None:
            self.context.engines.pop(self.id, None)
            usage, answered = self.context.usage, len(self.tokens)
            self.computed.add_to(usage, self.prompt_id, answered, cut_off=cut_off)
            if self.computed.prompt is None and self.replica_id is not None:
                usage.add_unanswered(self.prompt_id, prompt_length(self.request))
        self.replica_id = None
        if self.spans is not None:
            self.spans.done(self.prompt_id, prompt_length(self.request), len(self.tokens))

    def leave(self) -> None:
        """It is with no replica, and what the last one still sends is not for it."""
        if self.lost not in BLAMED and self.lost is not Loss.DRAINED:
            self.moves += 1
        self.computed.note(len(self.tokens), None)
        self._part()
        self.handed_over_at = None
        if self.tokens and self.paused_since is None:
            self.paused_since = self.last_token_at

    def hand_over(self, now: float) -> None:
        """Its prompt is computed; it is with no replica until the one that answers it has it."""
        self._part()
        self.handed_over, self.handed_over_at = len(self.tokens), now

    def _part(self) -> None:
        self.replica_id = self.routing = None
        self.attempt += 1
        self.placed_at = len(self.tokens)

    def route(self, candidates: frozenset[str]) -> RoutingRequest:
        request, params = self.request, self.request.sampling_params
        most = params.max_tokens if params is not None else None
        return RoutingRequest(
            request_id=self.id,
            external_id=self.prompt_id,
            prompt_token_ids=[*(request.prompt_token_ids or ()), *self.tokens],
            max_tokens=max(0, (most or 0) - len(self.tokens)),
            candidates=candidates,
            exclude=frozenset(self.ended_with),
            cache_salt=request.cache_salt,
            adapter=request.lora_request.lora_name if request.lora_request else None,
            # That it leaves where it is comes after the choice.
            attempt=self.attempt + (self.replica_id is not None),
            context=self.context,
        )

    def route_prompt(self, candidates: frozenset[str]) -> RoutingRequest:
        return replace(self.route(candidates), max_tokens=1, prompt_only=True)

    def to_send(self) -> EngineCoreRequest:
        """The request as its next engine gets it."""
        if self.answers is not None:
            return first_token_only(self.request)
        if not self.attempt:
            return self.request
        request = copy(self.request)
        request.request_id = self.wire_id
        if self.tokens and request.sampling_params is not None:
            request.sampling_params = params = copy(request.sampling_params)
            params.extra_args = {**(params.extra_args or {}), RESUMED: self.tokens}
            # They came with the first token.
            params.prompt_logprobs = None
        if self.handed_over and self.handed_over == len(self.tokens):
            return with_kv_from_store(request, self.handed_over_by)
        return request

    def loss_reported_by(self, output: EngineCoreOutput) -> Loss | None:
        """Why it leaves its engine, if that has ended it unasked or would have it elsewhere."""
        if output.finish_reason is FinishReason.ERROR:
            # The replica that answers it computes its prompt, too, and says whether that fails.
            return Loss.FORGOTTEN if self.answers is not None else None
        if output.finish_reason is FinishReason.ABORT:
            return Loss.FORGOTTEN
        self.wanted_at = asked_to(output)
        return None if self.wanted_at is None else Loss.MOVED

    def others(self, usable: frozenset[str], lost: Loss | None) -> frozenset[str]:
        """Replicas that could take it from the one it is with."""
        if lost is Loss.MOVED and self.replica_id is not None:
            # Only where that evens out loads: it is well where it is.
            usable &= {self.wanted_at or ""}
        return usable if self.replica_id is None else usable - {self.replica_id}

    def take(self, output: EngineCoreOutput, now: float) -> float | None:
        """Note an engine's output, and make it one of the whole request; returns the seconds of
        the pause if this is the first token after a move."""
        if self.context is not None:
            self.context.usage.outputs += 1
        if output.prefill_stats is not None:
            self.computed.begin(output.prefill_stats)
        if self.trace_headers is not None:
            # Any may be the last: vLLM ends answers at stop strings by itself.
            output.trace_headers = self.trace_headers
        if self.attempt:
            output.request_id = self.id
            if self.tokens:
                # vLLM's statistics know of its prompt, and when it was queued and scheduled.
                output.prefill_stats = None
                if output.events:
                    output.events = [each for each in output.events if each.type not in _FIRST_TOLD]
        self.tokens += output.new_token_ids
        if output.finish_reason is not None:
            self.computed.note(len(self.tokens), take_device_s(output))
        if not output.new_token_ids:
            return None
        self.last_token_at = now
        paused_since, self.paused_since = self.paused_since, None
        return None if paused_since is None else now - paused_since

    def ending(self, max_model_len: int) -> EngineCoreOutput | None:
        """The last output of an answer whose engine ended before it could send that."""
        params = self.request.sampling_params
        if params is None or not self.tokens:
            return None
        limits = AnswerLimits(
            prompt_tokens=prompt_length(self.request),
            max_tokens=params.max_tokens,
            max_model_len=max_model_len,
            eos_token=params.eos_token_id,
            stop_tokens=frozenset(params.stop_token_ids or ()),
        )
        ended = ending(self.tokens, limits)
        if ended is None:
            return None
        reason = FinishReason.STOP if ended.reason == "stop" else FinishReason.LENGTH
        how = {"finish_reason": reason, "stop_reason": ended.stop_token}
        return EngineCoreOutput(self.id, [], **how, trace_headers=self.trace_headers)


def digest(request: EngineCoreRequest) -> bytes:
    """A digest by which an equal request is known again."""
    features: Sequence[Any] = request.mm_features or ()
    adapter = request.lora_request.lora_name if request.lora_request else None
    said = msgspec.msgpack.encode(
        (request.prompt_token_ids, [each.identifier for each in features], adapter)
    )
    found = hashlib.blake2b(said, digest_size=_DIGEST_BYTES)
    params, bias = request.params, None
    if request.sampling_params is not None:
        bias = request.sampling_params.logit_bias
        params = copy(request.sampling_params)
        left = {
            key: value
            for key, value in (params.extra_args or {}).items()
            if not key.startswith(_HINTS)
        }
        params.extra_args = left or None
    found.update(repr((params, bias)).encode())
    return found.digest()


def prompt_length(request: EngineCoreRequest) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return 0 if request.prompt_embeds is None else len(request.prompt_embeds)
