"""LoRA adapters of one engine: its answers are stock vLLM's, token for token, whatever happens."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.engine import end, offline_engine
from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.models import catalog
from tests.integration.cores import core
from tests.integration.served_engine import (
    BareClient,
    ServedEngine,
    answers,
    connected,
    engine_start,
    pump_until,
    served,
)
from tests.peft_folders import write_adapter

pytestmark = pytest.mark.engine

TOKENS = 24
PROMPTS = (list(range(1000, 1100)), list(range(2000, 2040)))
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4}
NAMES = (None, "a", "b", "c")
SET_S = 30.0

Answers = Mapping[tuple[str | None, int], list[int]]


@dataclass
class Given:
    """A model, and folders of adapters of it, by name."""

    model: Path
    folders: dict[str, Path]

    def told(self, name: str, number: int, digest: str = "d") -> dict[str, Any]:
        return {"id": number, "name": f"{name}@{digest}", "path": str(self.folders[name])}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Given:
    folder = tmp_path_factory.mktemp("adapters")
    model = catalog.resolve("demo", folder)
    assert isinstance(model, Path)
    folders = {
        "a": write_adapter(folder / "a", model, seed=1, rank=8),
        "b": write_adapter(folder / "b", model, seed=2, rank=16, alpha=32),
        "c": write_adapter(folder / "c", model, seed=3, rank=4, targets=("q_proj", "down_proj")),
    }
    return Given(model, folders)


@pytest.fixture(scope="module")
def expected(given: Given) -> Answers:
    """What stock vLLM answers, by adapter and prompt."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.lora.request import LoRARequest

    llm = offline_engine(
        str(given.model), None, core=core(), dtype="float32", max_model_len=512,
        kv_cache_memory_bytes=96 * 2**20, **LORA,
    )  # fmt: skip
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    found: dict[tuple[str | None, int], list[int]] = {}
    for number, name in enumerate(NAMES):
        adapter = LoRARequest(name, number, str(given.folders[name])) if name else None
        prompts = [TokensPrompt(prompt_token_ids=each) for each in PROMPTS]
        outputs = llm.generate(prompts, greedy, lora_request=adapter, use_tqdm=False)
        for at, output in enumerate(outputs):
            found[name, at] = list(output.outputs[0].token_ids)
    end(llm)
    # Else nothing is tested by their being the same.
    for at in range(len(PROMPTS)):
        assert len({tuple(found[name, at]) for name in NAMES}) == len(NAMES)
    return found


@pytest.fixture(scope="module")
def engine(
    given: Given, expected: Answers, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServedEngine]:
    """One of the platform's, with a KV store; it starts once the stock one has ended."""
    folder = tmp_path_factory.mktemp("engine")
    store = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-adapters-{os.getpid()}"),
        memory=128 * 2**20,
    )
    server = StoreServer(open_store(store), store.address)
    server.start()
    connector = store.kv_transfer_config("demo")
    start = engine_start(str(given.model), folder, kv_transfer_config=connector, **LORA)
    try:
        with served(start) as running:
            yield running
    finally:
        server.stop()
        store.arena.unlink(missing_ok=True)


@pytest.fixture
def client(engine: ServedEngine) -> Iterator[BareClient]:
    with connected(engine.address) as one:
        yield one
    have(engine)


def have(engine: ServedEngine, *wanted: dict[str, Any]) -> tuple[dict[int, str], int]:
    return engine.run(engine.host.set_adapters(wanted, timeout_s=SET_S))


def ask(client: BareClient, told: dict[str, Any] | None, prompt: int = 0, **params: Any) -> str:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest(told["name"], told["id"], "where it came from") if told else None
    given = {"max_tokens": TOKENS, "ignore_eos": True, **params}
    return client.add(PROMPTS[prompt], adapter=adapter, **given)


def tokens(client: BareClient, *names: str) -> list[list[int]]:
    return [each.tokens for each in answers(client, names)]


def test_answers_are_those_of_stock_vllm_alone_and_in_one_batch(
    engine: ServedEngine, client: BareClient, given: Given, expected: Answers
) -> None:
    told = {"a": given.told("a", 1), "b": given.told("b", 2), "c": given.told("c", 3)}
    # Three, of which a step computes two.
    assert have(engine, *told.values()) == ({}, 0)
    for name in NAMES:
        names = [ask(client, told.get(name or ""), at) for at in range(len(PROMPTS))]
        assert tokens(client, *names) == [expected[name, at] for at in range(len(PROMPTS))]
    mixed = [(name, at) for at in range(len(PROMPTS)) for name in NAMES]
    names = [ask(client, told.get(name or ""), at) for name, at in mixed]
    assert tokens(client, *names) == [expected[each] for each in mixed]


def test_an_answer_goes_on_where_another_engine_left_it(
    engine: ServedEngine, client: BareClient, given: Given, expected: Answers
) -> None:
    told = given.told("a", 1)
    have(engine, told)
    for so_far in (1, 9):
        whole = expected["a", 0]
        name = ask(client, told, resumed=whole[:so_far])
        assert tokens(client, name) == [whole[so_far:]]


def test_other_weights_under_one_name_meet_nothing_of_those_before(
    engine: ServedEngine, client: BareClient, given: Given, expected: Answers
) -> None:
    before = given.told("a", 1, digest="d1")
    have(engine, before)
    for _ in range(2):  # the second time out of the prefix cache
        assert tokens(client, ask(client, before)) == [expected["a", 0]]
    running = ask(client, before, max_tokens=300)
    pump_until(lambda: len(client.streams[running].tokens) > 4, client)
    after = {**given.told("b", 4), "name": "a@d2"}
    # Its request runs, so the one before is still there, and is not for new ones.
    assert have(engine, after) == ({}, 1)
    assert tokens(client, ask(client, after)) == [expected["b", 0]]
    pump_until(lambda: len(client.streams[running].tokens) > 2 * TOKENS, client)
    assert client.streams[running].tokens[:TOKENS] == expected["a", 0]
    client.abort(running)
    pump_until(lambda: have(engine, after) == ({}, 0), client)
    # And back, by the store and the cache.
    have(engine, {**before, "id": 5})
    assert tokens(client, ask(client, {**before, "id": 5})) == [expected["a", 0]]


def test_what_is_wrong_with_one_is_told_and_the_engine_lives(
    engine: ServedEngine, client: BareClient, given: Given, expected: Answers, tmp_path: Path
) -> None:
    wide = shutil.copytree(given.folders["a"], tmp_path / "wide")
    tensors = load_file(wide / "adapter_model.safetensors")
    large = {
        name: np.concatenate([each, each], axis=1) if ".lora_A." in name else each
        for name, each in tensors.items()
    }
    save_file(large, wide / "adapter_model.safetensors")
    unknown = shutil.copytree(given.folders["a"], tmp_path / "unknown")
    renamed = {name.replace("q_proj", "r_proj"): each for name, each in tensors.items()}
    save_file(renamed, unknown / "adapter_model.safetensors")
    good = given.told("a", 1)
    wrong = [
        {"id": 10, "name": "wide", "path": str(wide)},
        {"id": 11, "name": "unknown", "path": str(unknown)},
        {"id": 12, "name": "vanished", "path": str(tmp_path / "vanished")},
        {**given.told("b", 13), "path": str(tmp_path)},
    ]
    problems, left = have(engine, good, *wrong)
    assert (set(problems), left) == ({10, 11, 12, 13}, 0)
    assert "r_proj" in problems[11]
    assert "vanished" in problems[12]
    assert tokens(client, ask(client, good)) == [expected["a", 0]]
    # A request for one of them is refused, and ends nothing else.
    (refused,) = answers(client, [ask(client, wrong[2])])
    assert (refused.finish, refused.tokens) == ("error", [])
    assert tokens(client, ask(client, None)) == [expected[None, 0]]


def test_one_whose_folder_vanishes_once_it_is_loaded_goes_on(
    engine: ServedEngine, client: BareClient, given: Given, expected: Answers, tmp_path: Path
) -> None:
    copy = shutil.copytree(given.folders["c"], tmp_path / "c")
    vanishing = {"id": 20, "name": "c@v", "path": str(copy)}
    others = [given.told("a", 21), given.told("b", 22)]
    have(engine, vanishing, *others)
    shutil.rmtree(copy)
    # Others push it out of the places of a step, and it comes back.
    for _ in range(2):
        for told, name in (*zip(others, ("a", "b"), strict=True), (vanishing, "c")):
            assert tokens(client, ask(client, told)) == [expected[name, 0]]


def test_there_is_room_for_so_many(engine: ServedEngine, client: BareClient, given: Given) -> None:
    many = [given.told("a", number, f"d{number}") for number in range(30, 35)]
    problems, _ = have(engine, *many)
    assert set(problems) == {34}
    assert "room for no more" in problems[34]
