"""When an engine sleeps, and what it does first."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from loomserve.platform.engine.sleeping.sleep import EngineSleep


class Core:
    """An engine core that notes what is done with it."""

    def __init__(self, *, device: str = "cpu", sleep_mode: bool = False) -> None:
        self.done: list[str] = []
        self.resets = True
        self.batch_queue: Any = None
        self.scheduler = SimpleNamespace(requests={}, reset_prefix_cache=self._reset)
        self.model_executor = SimpleNamespace(
            is_sleeping=False, sleep=self._sleep, wake_up=self._wake
        )
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device),
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
        )

    def _reset(self) -> bool:
        self.done.append("reset")
        return self.resets

    def reset_encoder_cache(self) -> None:
        self.done.append("encoder")

    def _sleep(self, level: int) -> None:
        self.done.append(f"sleep {level}")
        self.model_executor.is_sleeping = True

    def _wake(self, tags: object) -> None:
        self.done.append("wake")
        self.model_executor.is_sleeping = False


def test_it_forgets_what_its_blocks_hold_before_it_gives_them_back_and_does_so_once() -> None:
    core = Core()
    sleep = EngineSleep(core)
    sleep.fall_asleep(2)
    sleep.fall_asleep(2)
    assert core.done == ["reset", "encoder", "sleep 2"]
    assert sleep.asleep
    sleep.wake()
    sleep.wake()
    assert core.done[3:] == ["wake"]
    assert not sleep.asleep


@pytest.mark.parametrize("busy", ["requests", "step", "lent"])
def test_it_is_refused_while_blocks_are_in_use(busy: str) -> None:
    core = Core()
    if busy == "requests":
        core.scheduler.requests["r"] = object()
    elif busy == "step":
        core.batch_queue = ["a step in flight"]
    else:
        core.resets = False
    with pytest.raises(ValueError, match=r"requests|lent"):
        EngineSleep(core).fall_asleep()
    assert not any(each.startswith("sleep") for each in core.done)


def test_a_gpu_needs_vllms_own_sleep_mode() -> None:
    with pytest.raises(ValueError, match="enable_sleep_mode"):
        EngineSleep(Core(device="cuda")).fall_asleep()
    core = Core(device="cuda", sleep_mode=True)
    EngineSleep(core).fall_asleep()
    assert core.done[-1] == "sleep 1"
