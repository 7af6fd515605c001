"""vLLM's second model runner, which it has for GPUs, beneath our scheduler and KV store.

Its kernels are interpreted on a CPU (:mod:`tests.integration.second_runner_child`), but for one
that samples of the likeliest tokens alone, which the interpreter does not understand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import running_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.platform.engine.process import engine_process
from loomserve.platform.scheduling.options import ADDITIONAL_CONFIG
from tests.integration import tiny_llama
from tests.integration.served_engine import (
    BareClient,
    ServedEngine,
    Stream,
    answers,
    connected,
    engine_start,
    served,
)
from tests.integration.test_resumption import PENALTIES, SEEDED, salt

pytest.importorskip("triton", reason="Triton, which interprets the kernels, is not installed")
pytestmark = pytest.mark.engine

VOCABULARY, CONTEXT, TOKENS = 512, 256, 40
SEEDS = 5
BLOCKS = 4 * SEEDS // 2 + 3
"""Room for the prompts, and not for all answers; one block is vLLM's placeholder."""
BLOCK_BYTES = 2 * 2 * 32 * 2 * 32 * 4
PROMPT = list(range(100, 170))
ENDLESS = {"ignore_eos": True, "max_tokens": TOKENS}
CASES: dict[str, dict[str, Any]] = {
    "greedy": ENDLESS,
    "logprobs": {**ENDLESS, "logprobs": 5},
    "seeded": {**SEEDED, **ENDLESS},
    "seeded with penalties": {**SEEDED, **PENALTIES, **ENDLESS},
    "logit bias": {**SEEDED, **ENDLESS, "logit_bias": {100: 8.0, 200: 8.0}},
    "prompt logprobs": {**ENDLESS, "prompt_logprobs": 1, "logprobs": 1},
    "stop": {**SEEDED, **ENDLESS, "stop_token_ids": [*range(0, VOCABULARY, 4)], "min_tokens": 20},
}
# An interpreted step takes some tenths of a second.
WITHIN_S = 300.0


@pytest.fixture(scope="module", name="store")
def _store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoreOptions]:
    with running_store(tmp_path_factory.mktemp("store"), 64 * 2**20) as options:
        yield options


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save(folder, vocabulary=VOCABULARY, context=CONTEXT, head_size=32)
    return folder


@contextmanager
def engine_of(
    model: Path, store: StoreOptions, folder: Path, **options: Any
) -> Iterator[tuple[ServedEngine, BareClient]]:
    start = engine_start(
        str(model),
        folder,
        **{
            "skip_tokenizer_init": True,
            "max_model_len": CONTEXT,
            "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
            "kv_transfer_config": store.kv_transfer_config("tiny"),
            **options,
        },
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "_CHILD", "tests.integration.second_runner_child")
        with (
            served(start, fork=False, VLLM_USE_V2_MODEL_RUNNER="1") as engine,
            connected(engine.address) as client,
        ):
            yield engine, client


@pytest.fixture(scope="module", name="client")
def _client(
    model: Path, store: StoreOptions, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BareClient]:
    with engine_of(model, store, tmp_path_factory.mktemp("engine")) as (_, client):
        yield client


def asked(client: BareClient, *requests: tuple[Any, ...], **more: Any) -> list[Stream]:
    """Answers to requests that come together: tokens so far, and parameters."""
    names = [client.add(PROMPT, done, **{**params, **more}) for done, params in requests]
    return answers(client, names, WITHIN_S)


def test_answers_go_on_as_they_would_have(client: BareClient) -> None:
    wholes = asked(client, *(([], params) for params in CASES.values()), salt=salt())
    assert all(len(whole.tokens) == TOKENS for whole in wholes[:-1])
    assert 20 <= len(wholes[-1].tokens) < TOKENS
    assert wholes[-1].finish == "stop"
    cut = [
        (name, whole, after)
        for (name, _), whole in zip(CASES.items(), wholes, strict=True)
        for after in (1, 19)
    ]
    went_on = asked(
        client, *((whole.tokens[:after], CASES[name]) for name, whole, after in cut), salt=salt()
    )
    for (name, whole, after), rest in zip(cut, went_on, strict=True):
        assert rest.tokens == whole.tokens[after:], f"{name}, after {after}"
        assert rest.finish == whole.finish, name
        assert rest.prefills == 0, "its prefill is told once"
        told = zip(rest.tokens, rest.logprobs, whole.logprobs[after:], strict=bool(rest.logprobs))
        for token, ours, theirs in told:
            # That runner tells each request as many as any in the step has asked for.
            both = ours.keys() & theirs.keys()
            assert token in both
            assert {key: ours[key] for key in both} == pytest.approx(
                {key: theirs[key] for key in both}, abs=1e-4
            ), name


@pytest.mark.slow
def test_another_engine_goes_on_with_kv_from_the_store_and_swaps(
    model: Path, store: StoreOptions, client: BareClient, tmp_path: Path
) -> None:
    shared = salt()
    params = [{**SEEDED, **ENDLESS, "seed": seed} for seed in range(SEEDS)]
    wholes = asked(client, *(([], each) for each in params), salt=shared)
    swaps = {"preemption": "swap", "swap_bytes": 2**24, "peak_admission": False}
    with engine_of(
        model,
        store,
        tmp_path,
        kv_cache_memory_bytes=BLOCKS * BLOCK_BYTES,
        additional_config={ADDITIONAL_CONFIG: swaps},
    ) as (engine, other):
        (rest,) = asked(other, (wholes[0].tokens[:30], params[0]), salt=shared)
        assert rest.tokens == wholes[0].tokens[30:]
        assert other.stored_hits == (len(PROMPT) + 30) // 32 * 32
        # With KV of their own each, of which more is needed than there is.
        again = asked(other, *(([], {**each, "salt": salt()}) for each in params))
        scheduling = engine.run(engine.host.stats(10)).scheduling
        assert scheduling is not None
        assert scheduling.swapped_in > 0
    assert [each.tokens for each in again] == [each.tokens for each in wholes]
