"""Divides an engine's time among the requests that it computed.

A step's time goes to its requests by the tokens that the step computed of each, whatever context
those had. So all shares add up to the time of the steps. A front end gets a request's sum with its
last output, but not if it ends in another way.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

_TOLD = "loomserve_device_s"


class DeviceTime:
    """Seconds of each request that the scheduler has; used in its thread only.

    Requests that a step computes one token of have all the same seconds of it. So a running sum
    stands for the times of all that are in each step, and only others are looked at.
    """

    def __init__(self) -> None:
        self._sum = 0.0
        """Seconds of a token, summed over the steps."""
        self._since: dict[str, float] = {}
        """Of each request of the last step, what the sum is more than the request's seconds."""
        self._paused: dict[str, float] = {}
        """Seconds of requests that were in a step before the last one."""
        self._ended: dict[str, float] = {}

    def step(self, tokens: Mapping[str, int], seconds: float, there: Container[str]) -> None:
        """Divide a step's ``seconds`` by the tokens that it computed of each request. Only requests
        that are ``there`` have not ended; the tokens of others are not counted."""
        total = count = sum(tokens.values())
        if tokens.keys() != self._since.keys():
            count -= self._change(tokens, there)
        if not count:
            return
        a_token = seconds / count
        self._sum += a_token
        if total != len(tokens):
            for one in self._since:
                self._since[one] -= a_token * (tokens[one] - 1)

    def _change(self, tokens: Mapping[str, int], there: Container[str]) -> int:
        """Have the sum stand for a step's requests; returns the tokens of those that have ended."""
        since = self._since
        for one in since.keys() - tokens.keys():
            self._paused[one] = self._sum - since.pop(one)
        of_ended = 0
        for one in tokens.keys() - since.keys():
            if one in there:
                since[one] = self._sum - self._paused.pop(one, 0.0)
            else:
                of_ended += tokens[one]
        return of_ended

    def ended(self, request_id: str) -> None:
        """The scheduler has let a request go; its time is told at the next :meth:`tell`."""
        since = self._since.pop(request_id, None)
        seconds = self._paused.pop(request_id, None) if since is None else self._sum - since
        if seconds is not None:
            self._ended[request_id] = seconds
        if not self._since:
            # It need not grow for ever.
            self._sum = 0.0

    def tell(self, outputs: Iterable[EngineCoreOutputs]) -> None:
        """Write the time of each request that ended into its last output."""
        if not self._ended:
            return
        for of_one in outputs:
            for output in of_one.outputs:
                seconds = self._ended.get(output.request_id)
                if seconds is not None and output.finish_reason is not None:
                    output.kv_transfer_params = {
                        **(output.kv_transfer_params or {}),
                        _TOLD: seconds,
                    }
        self._ended.clear()


def take_device_s(output: EngineCoreOutput) -> float | None:
    """Take the seconds out of a last output, which clients do not get; None: it has none."""
    told = output.kv_transfer_params
    if told is None or _TOLD not in told:
        return None
    output.kv_transfer_params = {key: each for key, each in told.items() if key != _TOLD} or None
    return float(told[_TOLD])
