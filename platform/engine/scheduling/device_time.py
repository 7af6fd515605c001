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
    """Seconds of each request that the scheduler has; used in its thread only."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._ended: dict[str, float] = {}

    def step(self, tokens: Mapping[str, int], seconds: float, there: Container[str]) -> None:
        """Divide a step's ``seconds`` by the tokens that it computed of each request.

        Only requests that are ``there`` have not ended; the tokens of others are not counted.
        """
        shares = [(one, count) for one, count in tokens.items() if one in there]
        total = sum(count for _, count in shares)
        if not total:
            return
        a_token = seconds / total
        known = self._seconds
        for one, count in shares:
            known[one] = known.get(one, 0.0) + a_token * count

    def ended(self, request_id: str) -> None:
        """The scheduler has let a request go; its time is told at the next :meth:`tell`."""
        seconds = self._seconds.pop(request_id, None)
        if seconds is not None:
            self._ended[request_id] = seconds

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
