"""Real vLLM engines that tests share, for a start costs 25 s. They end with the tests of this
folder: those of the whole platform need their memory."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from benchmarks.engine import EXACT_BLOCK_BYTES, ONE_PROCESS, end, offline_engine
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Done, Flush, Inspect, StoreUsage
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.models import catalog
from loomserve.platform.state.kvstore import KvState
from tests.integration.cores import core
from tests.integration.lending_pair import (
    OWN_BLOCKS,
    Pair,
    answers,
    lending_engine,
    prompts,
)
from tests.integration.served_engine import ServedEngine, engine_start, served


@dataclass
class StoredEngine:
    """The engine, and the store, which a test may stop and start again."""

    llm: Any
    options: StoreOptions
    server: StoreServer | None = None

    def start_store(self) -> None:
        self.server = StoreServer(open_store(self.options), self.options.address)
        self.server.start()

    def stop_store(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def usage(self) -> KvState:
        return self.ask_store(Inspect(), StoreUsage).state

    def flush_store(self) -> None:
        self.ask_store(Flush(""), Done)

    def ask_store(self, request: Any, expected: type[Any]) -> Any:
        with closing(StoreClient(self.options.address, timeout_ms=5000)) as client:
            return client.ask(request, expected)

    def forget(self) -> None:
        """Empty the engine's own prefix cache, so that only the store can know a prefix."""
        assert self.llm.reset_prefix_cache()

    def answer(
        self,
        prompts: Sequence[list[int]],
        tokens: int = 8,
        kv_transfer: dict[str, Any] | None = None,
    ) -> list[Answer]:
        """Greedy answers of exactly so many tokens, the prompts together in one batch.

        ``kv_transfer`` is what the requests say to the connector.
        """
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        greedy = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": kv_transfer} if kv_transfer else None,
        )
        outputs = self.llm.generate(
            [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], greedy, use_tqdm=False
        )
        return [Answer(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    cached: int


@pytest.fixture(scope="package")
def served_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedEngine]:
    """An engine's process for clients, in float32."""
    folder = tmp_path_factory.mktemp("core")
    with served(engine_start(str(catalog.resolve("demo", folder)), folder)) as engine:
        yield engine


_Stored = TypeVar("_Stored", bound=StoredEngine)


@contextmanager
def with_store(engine: _Stored) -> Iterator[_Stored]:
    """The store runs; the engine is started, and set, within."""
    engine.start_store()
    yield engine
    end(engine.llm)
    engine.stop_store()
    engine.options.arena.unlink(missing_ok=True)


def exact_engine(folder: Path, kv_transfer_config: dict[str, Any]) -> Any:
    """An engine of the demo model; ``folder`` is where a relative path of it would begin."""
    return offline_engine(
        str(catalog.resolve("demo", folder)),
        kv_transfer_config,
        core=core(),
        # On every machine, so that a block has one size, and an answer the same tokens.
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        kv_cache_memory_bytes=96 * 2**20,
        **ONE_PROCESS,
    )


@pytest.fixture(scope="package")
def stored_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    folder = tmp_path_factory.mktemp("kv")
    options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-test-{os.getpid()}"),
        # 40 blocks of the demo model in float32: few enough that a dozen prompts overflow to SSD.
        memory=64 * 2**20,
        ssd_folder=folder / "ssd",
        ssd=1024 * 2**20,
    )
    with with_store(StoredEngine(None, options)) as engine:
        engine.llm = exact_engine(folder, options.kv_transfer_config("demo"))
        yield engine


@pytest.fixture(scope="package", name="pair")
def _pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = str(catalog.resolve("demo", tmp_path_factory.mktemp("model")))
    lent = 3 * OWN_BLOCKS
    hot = lending_engine(
        model,
        kv_cache_memory_bytes=OWN_BLOCKS * EXACT_BLOCK_BYTES,
        # A busy machine's lender is slow, and must not lose the loan for it.
        lending={
            "borrow_bytes": lent * EXACT_BLOCK_BYTES,
            "placement": "ratio",
            "patience_ms": 3000,
        },
    )
    cold = lending_engine(
        model,
        kv_cache_memory_bytes=(OWN_BLOCKS + lent) * EXACT_BLOCK_BYTES,
        number=1,
        lending={"lend_bytes": lent * EXACT_BLOCK_BYTES},
    )
    yield Pair(hot, cold)
    end(hot)
    end(cold)


@pytest.fixture(scope="package")
def stored_hot(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredEngine]:
    """Borrows from the pair's cold engine, may lend too, and has a KV store."""
    folder = tmp_path_factory.mktemp("kv")
    options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-hot-{os.getpid()}"),
        memory=256 * 2**20,
    )
    with with_store(StoredEngine(None, options)) as engine:
        engine.llm = lending_engine(
            str(catalog.resolve("demo", folder)),
            kv_transfer_config=options.kv_transfer_config("demo"),
            kv_cache_memory_bytes=OWN_BLOCKS * EXACT_BLOCK_BYTES,
            lending={
                "borrow_bytes": 3 * OWN_BLOCKS * EXACT_BLOCK_BYTES,
                "lend_bytes": OWN_BLOCKS // 2 * EXACT_BLOCK_BYTES,
                "patience_ms": 3000,
            },
        )
        yield engine


@pytest.fixture(scope="package", name="alone")
def _alone(pair: Pair) -> list[list[int]]:
    """What the hot engine answers without a lender, through preemptions."""
    return answers(pair.hot, prompts(1, 16))
