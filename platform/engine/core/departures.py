"""Requests that an engine would have go on elsewhere.

It only asks their clients: a request is computed here until its client has found that the
other replica takes it, and ends here as any that its client wants no more.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING

from loomserve.platform.scheduling.policy.preemption import StayingRequest

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

MOVE_TO = "loomserve_move_to"
"""Key in an output's ``kv_transfer_params``: the replica with which its request shall go on."""


def asking(request_id: str, to: str) -> EngineCoreOutput:
    """An output that asks a client to have the request go on with the replica ``to``."""
    from vllm.v1.engine import EngineCoreOutput

    return EngineCoreOutput(request_id, [], kv_transfer_params={MOVE_TO: to})


def asked_to(output: EngineCoreOutput) -> str | None:
    """The replica with which the request shall go on; None: it is an output as any."""
    given = output.kv_transfer_params
    return None if given is None or output.finished else given.get(MOVE_TO)


def movable(requests: Iterable[Request]) -> Iterator[StayingRequest]:
    """Requests that can go on elsewhere without losing what is just being computed or loaded."""
    from vllm.v1.request import RequestStatus

    for each in requests:
        runs = each.status is RequestStatus.RUNNING
        loads = each.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        if loads or each.resumable or each.is_finished() or (runs and each.is_prefill_chunk):
            continue
        yield StayingRequest(each.request_id, each.num_tokens, not runs, each.arrival_time)


class Departures:
    """The requests that were asked for last. EngineCore's thread changes it; any thread may
    :meth:`read`."""

    def __init__(self) -> None:
        self._asked: frozenset[str] = frozenset()
        self._left: frozenset[str] = frozenset()

    def ask(self, request_ids: Iterable[str]) -> None:
        self._asked, self._left = frozenset(request_ids), frozenset()

    def left(self, request_ids: Iterable[str]) -> None:
        if self._asked:
            self._left |= self._asked.intersection(request_ids)

    def read(self, here: Container[str]) -> tuple[int, int]:
        """How many have left, and how many of those that the engine has ``here`` are undecided."""
        left = self._left
        return len(left), sum(each in here for each in self._asked - left)
