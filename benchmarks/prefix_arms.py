"""Arms of benchmarks of prefixes: two engines of one model, a core each, with the same memory.

An arm with a KV store gives half of the memory to it, so that what the store holds is not memory
that the others lack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import percentiles
from benchmarks.load import Outcome
from benchmarks.platforms import Platform, configuration, served
from benchmarks.servers import Arm, EngineFlags, bare_arm
from benchmarks.workload import BLOCK_TOKENS
from loomserve.platform.devices.machine import cpu_dtype

CONTEXT = 2048
MODEL = "measured"
MEMORY_BYTES = 512 * 2**20
"""Of both engines and the store: some requests of full length, so that prefixes come back later
than an engine remembers them, as in a service with more conversations than memory."""
FIRST_PORT = 18600


@dataclass(frozen=True)
class Kind:
    """How an arm chooses a replica; ``None`` for vLLM's own servers, dealt requests in turn."""

    policy: str | None
    store: bool = False
    disk_bytes: int = 0
    """Of the store, which no engine can use by itself."""

    @property
    def store_bytes(self) -> int:
        return MEMORY_BYTES // 2 if self.store else 0

    @property
    def kv_bytes(self) -> int:
        """Of each engine."""
        return (MEMORY_BYTES - self.store_bytes) // 2


KINDS = {
    "store": Kind("load_aware", store=True),
    "store_and_disk": Kind("load_aware", store=True, disk_bytes=4 * 2**30),
    "store_round_robin": Kind("round_robin", store=True),
    "store_prefix_router": Kind("prefix_aware", store=True),
    "no_store": Kind("load_aware"),
    "round_robin": Kind("round_robin"),
    "prefix_router": Kind("prefix_aware"),
    "power_of_two": Kind("power_of_two"),
    "stock": Kind(None),
}


def flags(kind: Kind) -> EngineFlags:
    """Of each engine."""
    return EngineFlags(
        max_model_len=CONTEXT,
        max_num_batched_tokens=CONTEXT,
        max_num_seqs=16,
        block_size=BLOCK_TOKENS,
        kv_cache_memory_bytes=kind.kv_bytes,
        dtype=cpu_dtype(),
    )


def arm(name: str, model: str, place: int, folder: Path) -> tuple[Arm, Platform | None]:
    """Not started; ``place`` among the arms tells its ports. Of vLLM's own there is no platform."""
    kind, port = KINDS[name], FIRST_PORT + 10 * place
    if kind.policy is None:
        more = ("--enable-prompt-tokens-details",)
        names = (MODEL, MODEL)
        return bare_arm(name, model, flags(kind), port, folder, more=more, models=names), None
    engine = {**flags(kind).options(), "enable_prompt_tokens_details": True}
    of = served(MODEL, model, kind.kv_bytes, engine, router={"policy": kind.policy})
    store: dict[str, Any] = {"memory": kind.store_bytes}
    if kind.disk_bytes:
        store |= {"ssd": kind.disk_bytes, "ssd_path": str(folder / f"{name}-disk")}
    config = configuration(port, of, **({"kvstore": store} if kind.store else {}))
    platform = Platform(config, folder, name)
    return platform.arm(MODEL), platform


def urls(of: Arm) -> list[str]:
    """Where its requests go, in turn: one address of the platform, or each server's own."""
    return [f"http://127.0.0.1:{server.port}" for server in of.servers]


def figures(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Of whole answers; ``hit_rate`` is the share of their prompts' tokens that was found."""
    return {
        **percentiles("ttft_ms", [1000 * one.ttft for one in outcomes]),
        "hit_rate": sum(one.cached_tokens for one in outcomes)
        / sum(one.prompt_tokens for one in outcomes),
    }
