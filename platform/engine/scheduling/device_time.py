"""An engine's time, divided among the requests that it computed.

A step's time goes to its requests by the tokens that the step computed of each, whatever context
those had. So all shares add up to the time of the steps. A front end is told a request's sum with
its last output; of a request that ends in another way it is told nothing.
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
        """Divide a step's time.

        Args:
            tokens: computed of each request.
            seconds: that the step took.
            there: requests that have not ended; what was computed of others is the rest's.
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
        """The scheduler has let a request go; until :meth:`tell` its time can be told."""
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
    """The seconds that a last output tells, which its client is not told; None: it tells none."""
    told = output.kv_transfer_params
    if told is None or _TOLD not in told:
        return None
    output.kv_transfer_params = {key: each for key, each in told.items() if key != _TOLD} or None
    return float(told[_TOLD])
