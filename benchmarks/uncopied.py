"""vLLM's offloading connector without copies, of which it has none on CPUs."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import LoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class UncopiedWorker(OffloadingWorker):  # type: ignore[misc]
    """Says of each transfer that it has ended."""

    def __init__(self) -> None:
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src: LoadStoreSpec, dst: LoadStoreSpec) -> bool:
        self._ended.append(TransferResult(job_id=job_id, success=True))
        return True

    submit_load = submit_store

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass


class UncopiedSpec(CPUOffloadingSpec):  # type: ignore[misc]
    def get_worker(self, kv_caches: Any) -> UncopiedWorker:
        return UncopiedWorker()
