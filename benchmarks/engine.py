"""A real vLLM engine without a server, on one core: for benchmarks and tests."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loomserve.kvstore.server.opening import start_server
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.models import catalog
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from loomserve.platform.state.lending_options import LENDING_CONFIG

BLOCK_TOKENS = 32


def block_bytes(dtype: str) -> int:
    """Of SmolLM2-135M."""
    return 30 * 2 * 3 * 64 * BLOCK_TOKENS * (4 if dtype == "float32" else 2)


BLOCK_BYTES = block_bytes(cpu_dtype())
"""In the number format that this CPU computes in."""
EXACT = "float32"
"""The format in which an answer does not depend on who is computed with it
(:mod:`benchmarks.batch_dependence`)."""
EXACT_BLOCK_BYTES = block_bytes(EXACT)

ONE_PROCESS = {
    "distributed_executor_backend": "loomserve.platform.engine.executor.OneProcessExecutor"
}
"""As the platform's engines on a core: vLLM's own have a process for their worker."""


def engine_options(worker: str, scheduling: dict[str, Any]) -> dict[str, Any]:
    """Of an engine as the platform makes it, which schedules by ``SchedulerOptions``."""
    return {
        "worker_cls": worker,
        "scheduler_cls": "loomserve.platform.engine.scheduler.make_scheduler",
        "additional_config": {ADDITIONAL_CONFIG: scheduling},
        **ONE_PROCESS,
    }


@contextmanager
def running_store(folder: Path, memory: int = 768 * 2**20) -> Iterator[StoreOptions]:
    """A store in this process, with its socket in ``folder`` and so many bytes of memory."""
    options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-bench-{os.getpid()}"),
        memory=memory,
    )
    server, _ = start_server(options)
    try:
        yield options
    finally:
        server.stop()
        options.arena.unlink()


def save_llama(folder: Path, dtype: str = "float32", **shape: Any) -> None:
    """Write a Llama of random weights, the same each time, that no token ends.

    ``shape`` is of transformers' ``LlamaConfig``.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(eos_token_id=None, bos_token_id=None, **shape)
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)


def offline_engine(
    model: str, kv_transfer_config: dict[str, Any] | None, core: int | str = 0, **options: Any
) -> Any:
    """vLLM's ``LLM`` of a model folder, on a core or a stage on each of ``0|1``.

    ``options`` are under vLLM's own names.
    """
    options = {"enforce_eager": True, **options}
    os.environ.update(
        VLLM_CPU_OMP_THREADS_BIND=str(core),
        OMP_NUM_THREADS="1",
        VLLM_USE_V2_MODEL_RUNNER="0",
        VLLM_LOGGING_LEVEL="ERROR",
        # As on the platform: an eager engine compiles nothing.
        TORCHDYNAMO_DISABLE="1" if options["enforce_eager"] else "0",
    )
    import torch
    from vllm import LLM

    # An engine within this process comes after torch has counted the cores.
    torch.set_num_threads(1)
    return LLM(
        model=model,
        kv_transfer_config=kv_transfer_config,
        **{"dtype": cpu_dtype(), "block_size": BLOCK_TOKENS, **options},
    )


def end(llm: Any) -> None:
    """End the engine's processes at once, whoever still knows of it.

    Nothing of them is needed any more; in good order it takes each 5 s.
    """
    llm.llm_engine.engine_core.shutdown(timeout=0)


def demo_lending_engine(core: int, blocks: int, lending: dict[str, Any], **options: Any) -> Any:
    """Of the demo model in float32, with so many KV blocks, of which one is vLLM's placeholder."""
    return lending_engine(
        str(catalog.resolve("demo", Path.cwd())),
        lending,
        {"queue": "fcfs"},
        core=core % (os.cpu_count() or 1),
        dtype=EXACT,
        kv_cache_memory_bytes=blocks * EXACT_BLOCK_BYTES,
        **options,
    )


def lending_engine(
    model: str,
    lending: dict[str, Any],
    scheduling: dict[str, Any],
    kv_transfer_config: dict[str, Any] | None = None,
    worker: str = "loomserve.platform.lending.engine.cpu_worker.RemoteAttentionWorker",
    **options: Any,
) -> Any:
    """One that lends or borrows, by ``LendingOptions``, and schedules by ``SchedulerOptions``."""
    return offline_engine(
        model,
        kv_transfer_config,
        worker_cls=worker,
        scheduler_cls="loomserve.platform.lending.engine.scheduler.make_scheduler",
        **ONE_PROCESS,
        additional_config={ADDITIONAL_CONFIG: scheduling, LENDING_CONFIG: lending},
        **options,
    )


def call_loans(llm: Any, method: str, *args: Any) -> Any:
    """A call to the engine's scheduler about its loans, and what it returns."""
    return llm.collective_rpc(f"loans.{method}", args=args)[0]


async def token_times(
    llm: Any, prompt: list[int], tokens: int, name: str, times: list[float]
) -> None:
    """Add to ``times`` when each token of a greedy answer came, in monotonic seconds.

    Who cancels this aborts the request, and keeps the times of what came.

    Args:
        llm: vLLM's ``AsyncLLM``.
        prompt: its tokens.
        tokens: of the answer.
        name: the request's, of which no other has the same.
    """
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    async for output in llm.generate(
        TokensPrompt(prompt_token_ids=prompt),
        SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        ),
        name,
    ):
        times += [time.monotonic()] * len(output.outputs[0].token_ids)
