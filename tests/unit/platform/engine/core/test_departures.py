"""What an engine would have elsewhere, and what became of it."""

from __future__ import annotations

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import Request, RequestStatus

from loomserve.platform.engine.core.departures import Departures, asked_to, asking, movable


def made(name: str, status: RequestStatus, **changes: object) -> Request:
    request = Request(name, [1, 2, 3], SamplingParams(), None, arrival_time=2.0)
    request.status = status
    for field, value in changes.items():
        setattr(request, field, value)
    return request


def test_what_is_being_computed_or_loaded_or_comes_in_parts_stays() -> None:
    requests = [
        made("runs", RequestStatus.RUNNING),
        made("waits", RequestStatus.WAITING),
        made("preempted", RequestStatus.PREEMPTED),
        made("prefills", RequestStatus.RUNNING, is_prefill_chunk=True),
        made("loads", RequestStatus.WAITING_FOR_REMOTE_KVS),
        made("streams in", RequestStatus.WAITING_FOR_STREAMING_REQ, resumable=True),
        made("ended", RequestStatus.FINISHED_STOPPED),
    ]
    seen = {each.id: each.waits for each in movable(requests)}
    assert seen == {"runs": False, "waits": True, "preempted": True}
    assert {each.tokens for each in movable(requests)} == {3}


def test_clients_tell_what_is_asked_of_them_from_all_else() -> None:
    assert asked_to(asking("r", "b")) == "b"
    assert asked_to(EngineCoreOutput("r", [1])) is None
    stored = EngineCoreOutput("r", [], FinishReason.LENGTH, kv_transfer_params={"blocks": 3})
    assert asked_to(stored) is None


def test_those_that_end_here_or_elsewhere_are_not_undecided_any_more() -> None:
    departures = Departures()
    departures.left(["x"])
    assert departures.read({"x"}) == (0, 0)
    departures.ask(["r", "s", "t"])
    assert departures.read({"r", "s", "t", "u"}) == (0, 3)
    departures.left(["r", "u"])
    assert departures.read({"s", "t"}) == (1, 2)
    assert departures.read({"t"}) == (1, 1)
    departures.ask(["t"])
    assert departures.read({"t"}) == (0, 1)
