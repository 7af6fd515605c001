"""The speed of a device is its own, whatever else runs there while it is measured."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from loomserve.platform.config import Device
from loomserve.platform.engine.profiling import device_speed
from loomserve.platform.engine.profiling.device_speed import profile_devices

_COMPUTES = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


def _speeds(device: Device) -> tuple[float, float]:
    (measured,) = profile_devices([device], {}, [], lambda _: None).devices
    return measured.bytes_per_s, measured.flop_per_s


def test_a_device_that_others_use_meanwhile_is_no_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_speed, "_SECONDS_EACH", 0.03)
    core = min(os.sched_getaffinity(0))
    device = Device(name="core", cores=(core,))
    alone = _speeds(device)
    others = [subprocess.Popen([sys.executable, "-c", _COMPUTES, str(core)]) for _ in range(2)]
    try:
        beside = _speeds(device)
    finally:
        for each in others:
            each.kill()
            each.wait()
    # A third of its time is left for the measurement.
    assert all(now > 0.6 * before for before, now in zip(alone, beside, strict=True))
