"""vLLM's CPU worker, waiting for work without spinning."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from loomserve.platform.engine.waiting import sleep_instead_of_spinning


class PatientWorker(CPUWorker):  # type: ignore[misc]
    """Its core is another engine's, or the gateway's, while it has nothing to do."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its process makes the queue that it waits on later.
        sleep_instead_of_spinning()
