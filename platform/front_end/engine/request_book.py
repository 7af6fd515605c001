"""A model's open requests: placed on replicas, taken from those that are lost, and ended.

All of it runs on one event loop and waits for nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.serial_utils import MsgpackEncoder

from loomserve.platform.base.errors import ENGINE_STALLED, QUERY_OF_DEATH, EngineGone, RequestError
from loomserve.platform.disaggregation.engine.handoff import take_holder
from loomserve.platform.disaggregation.policy.prompts import PromptPlace
from loomserve.platform.engine.resumption.travelling import by_age
from loomserve.platform.front_end.engine.adapters import AdapterBook
from loomserve.platform.front_end.engine.handoffs import Handoffs, only_first
from loomserve.platform.front_end.engine.open_requests import ChosenReplica, OpenRequest, digest
from loomserve.platform.front_end.engine.replica import Clock, ConnectedReplica
from loomserve.platform.front_end.metrics import ModelContinuationMetrics
from loomserve.platform.front_end.policy.continuation import (
    Action,
    ContinuationBounds,
    Loss,
    next_action,
    suspicions,
)
from loomserve.platform.front_end.request_spans import ABORTED, FINISHED, HANDED_OVER
from loomserve.platform.front_end.routing import Choose, Left, RoutingContext, checked, nothing
from loomserve.platform.http.engine_errors import no_replica
from loomserve.platform.requests.query_of_death import QueriesOfDeath

_log = logging.getLogger(__name__)


class RequestBook:
    """The open requests of one model, and the rules by which they have replicas."""

    def __init__(
        self,
        model: str,
        replicas: Mapping[str, ConnectedReplica],
        choose: Choose,
        left: Left,
        metrics: ModelContinuationMetrics,
        bounds: ContinuationBounds,
        clock: Clock,
        encoder: MsgpackEncoder,
        handoffs: Handoffs,
        adapters: AdapterBook | None = None,
    ) -> None:
        self.open: dict[str, OpenRequest] = {}
        self.max_model_len = 2**31
        self.on_ended: Callable[[EngineCoreOutput], None] = nothing
        """An output that no engine sends any more."""
        self.on_failed: Callable[[str, Exception], None] = nothing
        """A request, by its id, ends with an error."""
        self._model, self._replicas = model, replicas
        self._choose, self._left = checked(choose), left
        self._metrics, self.bounds, self._clock = metrics, bounds, clock
        self._encoder, self._handoffs = encoder, handoffs
        self._adapters = adapters or AdapterBook()
        self._unplaced: dict[str, OpenRequest] = {}
        self._deadly = QueriesOfDeath(clock)
        self._usable: frozenset[str] = frozenset()
        """Ids of replicas that may get requests, as of the last look: to look at a thousand for
        each request takes longer than to choose."""

    def add(self, request: EngineCoreRequest, context: RoutingContext | None) -> None:
        """Place a request, or keep it until there is a replica for it."""
        one = self.open.get(request.request_id)
        if one is not None:
            self._more_input(one, request)
            return
        self._adapters.address(request)
        one = OpenRequest(request, context)
        one.begin()
        self.open[one.id] = self._unplaced[one.id] = one
        ended_with = self._deadly.replicas(digest(request)) if self._deadly else ()
        if len(ended_with) >= self.bounds.most_suspected:
            self._fail(one, Action.END_SUSPECT)
        else:
            self._decide(one, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget requests that clients or stop strings end; ended ones are passed over."""
        for request_id in request_ids:
            one = self.open.get(request_id)
            if one is not None:
                self._end(one, abort=True, cut_off=False)
        self.flush()

    def take(self, replica: ConnectedReplica, output: EngineCoreOutput, now: float) -> bool:
        """Note an engine's output; whether it is one of the request's answer."""
        one = replica.open.get(output.request_id)
        if one is None:
            return False
        lost = one.loss_reported_by(output)
        if lost is not None:
            if lost is Loss.FORGOTTEN:
                self._leave(one, lost, abort=False)
            self._decide(one, lost)
            replica.flush(self._encoder)
            return False
        if one.handed_over_at is not None and output.new_token_ids:
            self._handoffs.observe(replica.id, one, output, now)
        paused_s = one.take(output, now)
        if paused_s is not None:
            self._metrics.paused(paused_s)
        if one.answers is not None and output.finish_reason is not None:
            self._handoffs.placed(one.answers.replica_id, PromptPlace.PREFILL)
            one.handed_over_by = take_holder(output)
            if only_first(one, output, self.max_model_len):
                output.finish_reason = None
                self._hand_over(one, one.answers, now)
        if output.finish_reason is not None and not one.request.resumable:
            if one.deaths:
                self._deadly.answered(digest(one.request))
            self._end(one, abort=False, cut_off=_cuts_off(output))
        return True

    def lose_all(self, replica: ConnectedReplica, lost: Loss) -> None:
        """Take all requests from a replica, and send them on."""
        leaving = list(replica.open.values())
        self._look()
        for one in leaving:
            self._leave(one, lost, abort=lost not in (Loss.GONE, Loss.CUT))
        replica.flush(self._encoder)
        for one in leaving:
            self._decide(one, lost)

    def watch(self) -> None:
        """Look at all replicas, and at all requests that wait."""
        self._look()
        for replica in list(self._replicas.values()):
            lost = replica.loss(self.bounds) if replica.facts is not None else None
            for one in list(replica.open.values()):
                if lost is not None:
                    self._decide(one, lost)
                    continue
                one.waiting_since = None
                if self._deadly and one.deaths and not suspicions(one.view, self.bounds):
                    self._deadly.answered(digest(one.request))
        for one in list(self._unplaced.values()):
            self._decide(one, one.lost)
        self.flush()

    def flush(self) -> None:
        """Send collected aborts to engines."""
        for replica in self._replicas.values():
            replica.flush(self._encoder)

    def _look(self) -> frozenset[str]:
        there = self._replicas.values()
        self._usable = frozenset(each.id for each in there if each.usable(self.bounds))
        return self._usable

    def _more_input(self, one: OpenRequest, request: EngineCoreRequest) -> None:
        """More of the input of a streamed request, or its end."""
        one.request = request
        replica = self._replicas.get(one.replica_id or "")
        if replica is None or not replica.add(one, self._encoder.encode(by_age(request))):
            self._fail(one, Action.END_TOO_OFTEN)

    def _decide(self, one: OpenRequest, lost: Loss | None) -> None:
        last = one.ending(self.max_model_len)
        if last is not None:
            self._end(one, abort=True, cut_off=_cuts_off(last))
            self.on_ended(last)
            return
        if one.request.resumable and one.attempt:
            # Its input came in parts, which nobody has any more.
            self._fail(one, Action.END_TOO_OFTEN)
            return
        if lost is not None:
            self._note(one, lost)
        now = self._clock()
        usable = self._adapters.having(one.request, self._usable or self._look())
        others = one.others(usable, lost)
        decided = self._action(one, lost, now, others=bool(others))
        if decided is Action.GO_ON:
            if self._go_on(one, lost, others):
                return
            decided = self._action(one, lost, now, others=False)
        if decided is Action.WAIT:
            one.waiting_since = now if one.waiting_since is None else one.waiting_since
        else:
            self._fail(one, decided)

    def _action(self, one: OpenRequest, lost: Loss | None, now: float, *, others: bool) -> Action:
        return next_action(one.view, lost, others=others, now=now, bounds=self.bounds)

    def _go_on(self, one: OpenRequest, lost: Loss | None, others: frozenset[str]) -> bool:
        """Send a request to another replica, or end it; False: it has to wait."""
        routing = one.route(others)
        try:
            chosen = self._choose(routing)
            if chosen is None:
                return False
        except Exception as error:  # it is the router's, and one request's
            if isinstance(error, RequestError):
                error = LostRequestError(error)
            else:
                _log.exception("no replica could be chosen for request %s", one.id)
            self._fail(one, Action.END_NO_REPLICA, error)
            return True
        if lost is not None and one.replica_id is not None:
            self._leave(one, lost, abort=True)
        return self._start(one, ChosenReplica(chosen, routing), others)

    def _start(self, one: OpenRequest, answers: ChosenReplica, usable: frozenset[str]) -> bool:
        """Send a request to the replica that answers it, or first to one for its prompt."""
        place, prefill = self._handoffs.place(one, answers.replica_id, usable, self._choose)
        if prefill is not None:
            one.answers = answers
            if self._send(one, prefill):
                return True
            one.answers, place = None, PromptPlace.PREFILL_AWAY
        sent = self._send(one, answers)
        if sent and place is not None:
            self._handoffs.placed(answers.replica_id, place)
        return sent

    def _hand_over(self, one: OpenRequest, answers: ChosenReplica, now: float) -> None:
        """The prompt is computed, and the request goes to the replica that answers it."""
        one.answers = None
        self._part(one, HANDED_OVER, abort=False)
        one.hand_over(now)
        self._unplaced[one.id] = one
        if not self._handoffs.takes_over(answers.replica_id, self._usable or self._look()):
            self._left(answers.routing, answers.replica_id)
        elif self._send(one, answers):
            return
        self._decide(one, None)

    def _send(self, one: OpenRequest, chosen: ChosenReplica) -> bool:
        replica = self._replicas[chosen.replica_id]
        if not replica.add(one, self._encoder.encode(by_age(one.to_send()))):
            self._left(chosen.routing, replica.id)
            return False
        one.place(chosen, lambda: replica.steps)
        self._unplaced.pop(one.id, None)
        if one.attempt and one.lost is not None:
            self._metrics.continued(one.lost)
        return True

    def _leave(self, one: OpenRequest, lost: Loss, *, abort: bool) -> None:
        self._note(one, lost)
        if one.answers is not None:
            self._handoffs.placed(one.answers.replica_id, PromptPlace.PREFILL_AWAY)
        self._part(one, lost, abort=abort)
        one.leave()
        self._unplaced[one.id] = one

    def _note(self, one: OpenRequest, lost: Loss) -> None:
        if one.note_loss(lost) and lost is Loss.GONE and one.replica_id is not None:
            self._deadly.ended(digest(one.request), one.replica_id)

    def _part(self, one: OpenRequest, why: str, *, abort: bool) -> None:
        if one.spans is not None:
            one.spans.end(why, len(one.tokens))
        if one.answers is not None:
            self._left(one.answers.routing, one.answers.replica_id)
            one.answers = None
        if one.replica_id is None:
            return
        replica = self._replicas.get(one.replica_id)
        if replica is not None:
            replica.drop(one.wire_id, abort=abort)
        if one.routing is not None:
            self._left(one.routing, one.replica_id)

    def _end(self, one: OpenRequest, *, abort: bool, cut_off: bool) -> None:
        self._part(one, ABORTED if abort else FINISHED, abort=abort)
        one.end(cut_off=cut_off)
        self.open.pop(one.id, None)
        self._unplaced.pop(one.id, None)

    def _fail(self, one: OpenRequest, why: Action, error: Exception | None = None) -> None:
        self._end(one, abort=True, cut_off=True)
        self._metrics.ended(why)
        cause = error or lost_request(why, self._model, one.id)
        if one.context is not None and isinstance(cause, LostRequestError):
            one.context.failure = cause.error
        self.on_failed(one.id, cause)


def _cuts_off(last: EngineCoreOutput) -> bool:
    return last.finish_reason is not FinishReason.STOP


class LostRequestError(GracefulHTTPError):  # type: ignore[misc]
    """A platform error (``error``) in the shape that vLLM's serving layer takes."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message, HTTPStatus(error.status))
        self.error = error


def lost_request(action: Action, model: str, request_id: str) -> LostRequestError:
    tell = f"give the operator its id, {request_id}"
    change = f"on this very request, so no other is asked. Change the request, or {tell}"
    again = f"on this request; send it again. If that happens again, {tell}"
    engines = f"the engines of model {model!r}"
    match action:
        case Action.END_SUSPECT:
            words = f"engines of model {model!r} ended while they worked {change}"
            return LostRequestError(EngineGone(words, reason=QUERY_OF_DEATH))
        case Action.END_STALLED:
            words = f"engines of model {model!r} stood still while they worked {change}"
            return LostRequestError(EngineGone(words, reason=ENGINE_STALLED))
        case Action.END_TOO_OFTEN:
            words = f"{engines} ended again and again while they worked {again}"
        case Action.END_RETURNED:
            words = f"the engine of model {model!r} ended while it worked {again}"
        case _:
            return LostRequestError(no_replica(model))
    return LostRequestError(EngineGone(words))
