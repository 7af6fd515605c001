"""Faults of a simulated engine, which its configuration or a client asks for."""

from __future__ import annotations

import logging
import math
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from loomserve.platform.config import Fault

_logger = logging.getLogger(__name__)

# Longer than any run; no process can be had to sleep for centuries.
_FOR_GOOD_S = 1e9


def moments(fault: Fault, seed: str) -> Iterator[float]:
    """Seconds or requests until a fault comes, each time; the same ones for the same seed. Pure."""
    drawn = random.Random(seed)
    mean = fault.after_s or fault.after_requests or 1
    while True:
        yield mean * (1 + fault.spread * drawn.uniform(-1, 1))


@dataclass
class _Planned:
    fault: Fault
    moments: Iterator[float]
    left: float
    """Seconds or requests until it comes."""


class Faults:
    """Faults of one engine, which come to pass in its loop, between two steps."""

    def __init__(
        self,
        faults: Sequence[Fault],
        seed: str,
        between_steps: Callable[[Callable[[], None]], object],
    ) -> None:
        """``between_steps`` has the engine's loop do something. ``seed`` is the configuration's,
        and what tells this engine from others."""
        self._between_steps = between_steps
        self._factor, self._slow_until = 1.0, 0.0
        self._sending_s = 0.0
        self._planned = [
            _Planned(fault, times := moments(fault, f"{seed} {at}"), next(times))
            for at, fault in enumerate(faults)
        ]

    @property
    def slowness(self) -> float:
        """How many times as long as else a step takes."""
        return self._factor if time.monotonic() < self._slow_until else 1.0

    def begin(self) -> None:
        """Count seconds from now on."""
        for each in self._planned:
            if each.fault.after_s is not None:
                self._await(each, each.left)

    def _await(self, one: _Planned, seconds: float) -> None:
        come = partial(self._between_steps, partial(self._come, one))
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), come)
        timer.daemon = True
        timer.start()

    def count_request(self) -> None:
        for each in self._planned:
            if each.fault.after_requests is not None:
                each.left -= 1
                if each.left < 0.5:
                    each.left = next(each.moments)
                    self._between_steps(partial(self._come, each))

    def _come(self, one: _Planned) -> None:
        fault = one.fault
        _logger.warning("the engine has a fault of its configuration: %s", fault.what)
        if fault.what == "hang":
            self.hang(fault.seconds)
        elif fault.what == "slow_down":
            self.slow_down(fault.factor or 1.0, fault.seconds)
        else:
            self.die()
        if fault.after_s is not None:
            # One that hangs has hung by then.
            slow_s = fault.seconds or math.inf if fault.what == "slow_down" else 0.0
            self._await(one, slow_s + next(one.moments))

    def hang(self, seconds: float | None = None) -> None:
        """Take no steps; None: for good."""
        time.sleep(_FOR_GOOD_S if seconds is None else min(seconds, _FOR_GOOD_S))

    def slow_down(self, factor: float, seconds: float | None = None) -> None:
        """Have each step take so many times as long; None: for good."""
        self._factor = factor
        self._slow_until = math.inf if seconds is None else time.monotonic() + seconds

    def slow_outputs(self, seconds: float | None = None) -> None:
        """Have each message of outputs take so long to send, while steps go on; None: for good."""
        self._sending_s = _FOR_GOOD_S if seconds is None else seconds

    def send(self) -> None:
        """Called by the thread that sends, for each message of outputs."""
        time.sleep(self._sending_s)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
