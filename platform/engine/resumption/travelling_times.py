"""A request's times on its way from a front end to an engine, which may be on another machine.

Neither clock of another machine can be compared with one's own. So what travels has ages: when it
came is seconds ago, less than 0, and its deadline is the seconds that are left. The way itself
counts as nothing.
"""

from __future__ import annotations

import time
from copy import copy

from vllm.v1.engine import EngineCoreRequest

from loomserve.platform.scheduling.policy.deadline import DEADLINE, deadline_of


def by_age(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request of this process as it is sent now."""
    return _shifted(request, -time.time(), -time.monotonic())


def by_own_clocks(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request that has just been received, by the clocks of this process."""
    return _shifted(request, time.time(), time.monotonic())


def _shifted(
    request: EngineCoreRequest, arrival_later_s: float, deadline_later_s: float
) -> EngineCoreRequest:
    shifted, params = copy(request), request.sampling_params
    shifted.arrival_time = request.arrival_time + arrival_later_s
    deadline = deadline_of(params.extra_args) if params is not None else None
    if params is not None and deadline is not None:
        shifted.sampling_params = params = copy(params)
        params.extra_args = {**(params.extra_args or {}), DEADLINE: deadline + deadline_later_s}
    return shifted
