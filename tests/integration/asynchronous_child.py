"""An engine's process that schedules a step while another runs, which vLLM turns off on a CPU."""

from __future__ import annotations

from typing import Any

from loomserve.platform.engine.core import child


def main(control: int, how: str = "") -> None:
    from vllm import AsyncEngineArgs

    from loomserve.platform.engine.core.served_core import ServedEngineCore

    made = AsyncEngineArgs.create_engine_config

    def asynchronous(*args: Any, **kwargs: Any) -> Any:
        config = made(*args, **kwargs)
        config.scheduler_config.async_scheduling = True
        return config

    def one_at_a_time(self: Any) -> Any:
        raise AssertionError("no step is in flight while the next is scheduled")

    ServedEngineCore.step = one_at_a_time  # type: ignore[method-assign]
    AsyncEngineArgs.create_engine_config = asynchronous
    child.main(control, how)
