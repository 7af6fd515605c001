"""Are greedy tokens the same whoever computed the KV?

Real prompts go through a real engine in batches of the same composition: without the store, with
it while it is empty, with the prefix from memory, and with the prefix from SSD. Then each batch
goes to a platform that prefills on one replica and decodes on another. The answers of each pass
stand against those of the first. All compute in float32, since in bfloat16 a greedy answer depends
on who is computed with it. The last line of the output is one JSON object.

``--prompts`` takes JSON lines (gzipped or not); every text field ``--field`` is cut to ``--tokens``
tokens, so that documents give as many prompts as they have room for.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.engine import BLOCK_TOKENS, offline_engine
from benchmarks.load import Target, new_session
from benchmarks.result_files import machine, publish
from benchmarks.servers import configured_arm, running
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Inspect, StoreUsage
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.models import catalog

BATCH = 8
DTYPE = "float32"
MODEL = "demo"
PORT = 18660


def texts(path: Path, field: str) -> Iterator[str]:
    content = path.read_bytes()
    lines = (gzip.decompress(content) if path.suffix == ".gz" else content).splitlines()
    for line in filter(None, lines):
        yield str(json.loads(line)[field])


def prompts(tokenizer: Any, path: Path, field: str, count: int, tokens: int) -> list[list[int]]:
    """The first ``count`` pieces of ``tokens`` tokens, all different.

    Raises:
        ValueError: the file has too few.
    """
    found: dict[tuple[int, ...], None] = {}
    for text in texts(path, field):
        ids = tokenizer.encode(text)
        for start in range(0, len(ids) - tokens + 1, tokens):
            found[tuple(ids[start : start + tokens])] = None
            if len(found) == count:
                return [list(ids) for ids in found]
    raise ValueError(f"{path} has only {len(found)} pieces of {tokens} tokens")


def engine(kv_transfer_config: dict[str, Any] | None) -> Any:
    return offline_engine(
        str(catalog.resolve("demo", Path.cwd())),
        kv_transfer_config,
        dtype=DTYPE,
        max_model_len=1024,
        max_num_seqs=BATCH,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=512 * 2**20,
    )


def answers(llm: Any, batches: Sequence[list[list[int]]], tokens: int) -> tuple[list[Any], int]:
    """Greedy tokens of all prompts, and how many prompt tokens were cached."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    greedy = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    found: list[Any] = []
    cached = 0
    for batch in batches:
        asked = [TokensPrompt(prompt_token_ids=ids) for ids in batch]
        for output in llm.generate(asked, greedy, use_tqdm=False):
            found.append(list(output.outputs[0].token_ids))
            cached += output.num_cached_tokens
    return found, cached


def separated(batches: Sequence[list[list[int]]], tokens: int, folder: Path) -> Any:
    """Greedy tokens by way of a prefill replica and a decode replica, and the shares of requests
    that were handed over and of prompt tokens that came from the store."""
    config = {
        "devices": [{"name": f"core{core}", "kind": "cpu", "cores": [core]} for core in range(2)],
        "models": [
            {
                "name": MODEL,
                "source": "demo",
                "devices": ["core0", "core1"],
                "replicas": 2,
                "roles": {"prefill": 1, "decode": 1, "local_prompt_tokens": 0},
                "engine": {
                    "max_model_len": 1024,
                    "max_num_seqs": BATCH,
                    "block_size": BLOCK_TOKENS,
                    "enforce_eager": True,
                    "dtype": DTYPE,
                },
            }
        ],
        "kvstore": {"memory": "1GiB"},
        "server": {"port": PORT},
    }
    arm = configured_arm("separated", config, MODEL, PORT, folder)
    with running([arm], start_timeout=600, bind=False):
        arm.thaw()
        time.sleep(5)  # replicas hear of each other with their reports
        before = handed_over(arm.target)
        found = [uvloop.run(over_http(arm.target, batch, tokens)) for batch in batches]
        time.sleep(2.5)
        after = handed_over(arm.target)
    requests = sum(map(len, batches))
    prompt_tokens = sum(len(ids) for batch in batches for ids in batch)
    answers = [ids for batch in found for ids in batch]
    return (
        answers,
        (after.requests - before.requests) / requests,
        (after.tokens_from_store - before.tokens_from_store) / prompt_tokens,
    )


class HandedOver(NamedTuple):
    """So far, between replicas that prefill and that decode."""

    requests: float
    tokens_from_store: float


def handed_over(target: Target) -> HandedOver:
    with urllib.request.urlopen(f"{target.url}/metrics", timeout=10) as response:
        page = response.read().decode()
    return HandedOver(
        metric(page, "loomserve_handoffs_total", outcome="continued"),
        metric(page, "loomserve_handoff_tokens_total", source="store"),
    )


async def over_http(target: Target, batch: list[list[int]], tokens: int) -> list[list[int]]:
    async with new_session() as session:

        async def one(ids: list[int]) -> list[int]:
            body = {
                "model": target.model,
                "prompt": ids,
                "max_tokens": tokens,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            async with session.post(f"{target.url}/v1/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            return list(answer["choices"][0]["token_ids"])

        return await asyncio.gather(*map(one, batch))


def metric(page: str, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def passes(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    store_options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-exact-{os.getpid()}"),
        memory=options.memory_mib * 2**20,
        ssd_folder=folder / "ssd",
        ssd=8 * 2**30,
        eviction="lru",
        quotas={},
    )
    llm = engine(None)
    pieces = prompts(llm.get_tokenizer(), options.prompts, options.field, options.count,
                     options.tokens)  # fmt: skip
    batches = [pieces[at : at + BATCH] for at in range(0, len(pieces), BATCH)]
    off, _ = answers(llm, batches, options.answer)
    del llm
    server = StoreServer(open_store(store_options), store_options.address)
    server.start()
    try:
        llm = engine(store_options.kv_transfer_config(MODEL))
        found: dict[str, Any] = {}
        # Each batch right after its first pass comes from memory; a whole second round of all
        # batches finds most of them on SSD, since memory holds a few batches only.
        cold, warm, cached = [], [], 0
        for batch in batches:
            cold += answers(llm, [batch], options.answer)[0]
            time.sleep(0.05)
            llm.reset_prefix_cache()
            again, hit = answers(llm, [batch], options.answer)
            warm += again
            cached += hit
            llm.reset_prefix_cache()
        promoted, promoted_tokens = answers(llm, batches, options.answer)
        with closing(StoreClient(store_options.address, timeout_ms=5000)) as client:
            usage = client.ask(Inspect(), StoreUsage)
        del llm
        apart, handed_share, from_store = separated(batches, options.answer, folder)
        rounds = {"on_empty": cold, "from_memory": warm, "from_ssd": promoted,
                  "prefill_decode": apart}  # fmt: skip
        for name, got in rounds.items():
            found[name] = sum(a == b for a, b in zip(off, got, strict=True)) / len(off)
        total = sum(map(len, pieces))
        return {
            "identical_share": found,
            "from_ssd_equal_to_from_memory": sum(
                a == b for a, b in zip(warm, promoted, strict=True)
            )
            / len(warm),
            "cached_share": {
                "from_memory": cached / total,
                "from_ssd": promoted_tokens / total,
                "prefill_decode": from_store,
            },
            "handed_over_share": handed_share,
            "store": {
                "capacity_bytes": usage.capacity_bytes,
                "ssd_used_bytes": usage.ssd_used_bytes,
                "corrupt_blocks": usage.corrupt_blocks,
            },
        }
    finally:
        server.stop()
        store_options.arena.unlink(missing_ok=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.exactness", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--prompts", type=Path, required=True, help="JSON lines, may be gzipped")
    parser.add_argument("--field", default="text")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=200, help="length of a prompt")
    parser.add_argument("--answer", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--memory-mib", type=int, default=256, help="the store's memory")
    options = parser.parse_args()
    facts = machine()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        figures = passes(options, Path(folder))
    setup = {name: getattr(options, name) for name in ("count", "tokens", "answer", "memory_mib")}
    publish("exactness", figures, setup=setup, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
