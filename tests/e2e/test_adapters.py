"""LoRA adapters as clients and operators meet them; that answers are stock vLLM's, the integration
test has."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from loomserve.platform.models import catalog
from tests.e2e.conftest import ENGINE, Platform, started
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_batch import COMPLETIONS, ended, line, lines_of, submit
from tests.e2e.test_failures import engine_process, kill_controller
from tests.e2e.test_kvstore import command
from tests.peft_folders import write_adapter

pytestmark = pytest.mark.e2e

BASE, SQL, POET, LATE, AWAY = "chat", "chat-sql", "chat-poet", "away-sql", "away"
PROMPT = "Once upon a time there was a fox who lived in a wood, and each morning " * 8
TOKENS = 24
BACK_S = 120.0
# Gateways promise about a second; the machine that tests may be busy.
KNOWN_S = 5.0


def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    adapters = {"max_loras": 2, "max_lora_rank": 16, "max_cpu_loras": 4}
    model = {"source": "demo", "kv_cache_memory": "256MiB", "engine": ENGINE}
    return {
        "devices": [
            {"name": "core0", "cores": [0]},
            {"name": "core1", "cores": [min(1, (os.cpu_count() or 1) - 1)]},
        ],
        "models": [
            {
                **model,
                "name": BASE,
                "devices": ["core0", "core1"],
                "replicas": 2,
                "router": {"policy": "prefix_aware"},
                "adapters": {**adapters, "load": [{"name": SQL, "source": "loras/sql"}]},
            },
            {
                **model,
                "name": AWAY,
                "devices": ["core0"],
                "start": "on_demand",
                "adapters": {**adapters, "load": [{"name": LATE, "source": "loras/sql"}]},
            },
        ],
        "aliases": {"canary": {BASE: 0, SQL: 1}},
        "kvstore": {"memory": "256MiB"},
        "batch": {"folder": "batch"},
        "server": {
            "port": port,
            "drain_timeout_s": 20,
            "admin_token_hash": hashes[2],
            "api_keys": [
                {"name": "all", "hash": hashes[0]},
                {"name": "narrow", "hash": hashes[3], "models": [SQL]},
            ],
        },
    }


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration's, with adapters beside it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = catalog.resolve("demo", folder)
    assert isinstance(model, Path)
    for name, seed, rank in (("sql", 1, 8), ("poet", 2, 16), ("large", 3, 32)):
        write_adapter(folder / "loras" / name, model, seed=seed, rank=rank)
    other = {"model.layers.0.self_attn.q_proj.weight": (64, 64)}
    write_adapter(folder / "loras" / "other", other, seed=4)
    return folder


@pytest.fixture(scope="module")
def platform(folder: Path) -> Iterator[Platform]:
    with started(folder, configured) as running:
        yield running


def answer(
    platform: Platform, model: str, key: str | None = None, prompt: str = PROMPT, **params: Any
) -> Any:
    given = {"max_tokens": TOKENS, "temperature": 0, "extra_body": {"ignore_eos": True}}
    return platform.client(key).completions.create(
        model=model, prompt=prompt, timeout=BACK_S, **{**given, **params}
    )


def text(platform: Platform, model: str) -> str:
    return str(answer(platform, model).choices[0].text)


def ended_stream(stream: Any) -> str:
    """The rest of its text, once it has all its tokens."""
    chunks = list(stream)
    assert chunks[-1].choices[0].finish_reason == "length"
    return "".join(chunk.choices[0].text for chunk in chunks)


def root(platform: Platform, name: str) -> str | None:
    """What clients are told of an adapter's source; None: there is no such adapter."""
    with platform.http() as http:
        card = http.get(f"/v1/models/{name}").json()
    return card.get("root")


def load(platform: Platform, name: str, source: str) -> dict[str, Any]:
    """Load an adapter, and wait until the gateway knows."""
    said = put(platform, name, source)
    assert said.status_code == 200, said.text
    wait_for(lambda: root(platform, name) == source, KNOWN_S)
    return dict(said.json())


def put(platform: Platform, name: str, source: str, model: str = BASE) -> httpx.Response:
    with platform.admin() as admin:
        path = f"/admin/v1/models/{model}/adapters/{name}"
        return admin.put(path, json={"source": source})


def delete(platform: Platform, name: str) -> None:
    with platform.admin() as admin:
        admin.delete(f"/admin/v1/models/{BASE}/adapters/{name}").raise_for_status()
    wait_for(lambda: root(platform, name) is None, KNOWN_S)


@pytest.fixture(scope="module")
def texts(platform: Platform) -> dict[str, str]:
    """What each answers, undisturbed."""
    assert len(load(platform, POET, "loras/poet")["replicas"]) == 2
    found = {name: text(platform, name) for name in (POET, SQL, BASE)}
    assert len(set(found.values())) == 3
    return found


def test_they_are_listed_as_vllm_does_and_answer_under_their_names(
    platform: Platform, texts: dict[str, str]
) -> None:
    cards = {card.id: card for card in platform.client().models.list()}
    assert {BASE, SQL, POET, LATE} <= set(cards)
    assert (cards[SQL].parent, cards[SQL].root) == (BASE, "loras/sql")
    assert answer(platform, SQL).model == SQL
    chat = platform.client().chat.completions.create(
        model=POET, messages=[{"role": "user", "content": "Hello"}], max_tokens=2
    )
    assert chat.model == POET
    assert platform.metric("loomserve_adapter_replicas", adapter=SQL) == 2
    assert platform.metric("loomserve_adapter_requests_total", adapter=POET, status="200") >= 1
    assert SQL in command(platform, "status")


def test_no_adapter_meets_anothers_kv(platform: Platform, texts: dict[str, str]) -> None:
    prompt = "A prompt that nobody has sent before, and that has blocks enough. " * 16

    def cached(model: str) -> int:
        details = answer(platform, model, prompt=prompt, max_tokens=1).usage.prompt_tokens_details
        return 0 if details is None else int(details.cached_tokens)

    for model in (SQL, POET, BASE):
        assert cached(model) == 0
    for model in (BASE, POET, SQL):
        assert cached(model) > 100


def test_other_weights_under_a_name_answer_at_once_and_streams_keep_theirs(
    platform: Platform, texts: dict[str, str], folder: Path
) -> None:
    load(platform, "shifting", "loras/sql")
    assert text(platform, "shifting") == texts[SQL]
    stream = answer(platform, "shifting", stream=True, max_tokens=120)
    first = next(stream).choices[0].text
    load(platform, "shifting", "loras/poet")
    assert text(platform, "shifting") == texts[POET]
    delete(platform, "shifting")
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        text(platform, "shifting")
    assert (first + ended_stream(stream)).startswith(texts[SQL])


@pytest.mark.parametrize(
    ("model", "name", "source", "status", "param", "words"),
    [
        (BASE, "x", "loras/large", 400, "source", "r is 32, and the model takes adapters of rank"),
        (BASE, "x", "loras/other", 400, "source", "it is an adapter of another model"),
        (BASE, "x", "loras/gone", 400, "source", "there is no folder"),
        (BASE, "x", ".", 400, "source", "adapter_config.json is missing"),
        (BASE, AWAY, "loras/sql", 409, "name", "a model is named"),
        (BASE, "canary", "loras/sql", 409, "name", "an alias is named"),
        (BASE, LATE, "loras/sql", 409, "name", "an adapter of model"),
        (BASE, "-", "loras/sql", 400, "name", "is no name"),
        ("gone", "x", "loras/sql", 404, None, "'gone'"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(
    platform: Platform, model: str, name: str, source: str, status: int, param: str, words: str
) -> None:
    said = put(platform, name, source, model)
    error = said.json()["error"]
    assert (said.status_code, error["param"]) == (status, param)
    assert words in error["message"]


def test_keys_aliases_and_batches_name_them_as_models(
    platform: Platform, texts: dict[str, str]
) -> None:
    narrow = platform.narrow_key
    assert answer(platform, SQL, narrow).choices[0].text == texts[SQL]
    for model in (BASE, POET):
        with pytest.raises(openai.PermissionDeniedError):
            answer(platform, model, narrow)
    assert [card.id for card in platform.client(narrow).models.list()] == [SQL, "canary"]
    assert answer(platform, "canary").model == SQL
    client = platform.client()
    given = {"prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
    lines = [line(name, COMPLETIONS, name, **given) for name in (SQL, POET, BASE, "canary")]
    batch = ended(client, submit(client, lines, COMPLETIONS))
    answers = lines_of(client, batch.output_file_id)
    said = {n: one["response"]["body"]["choices"][0]["text"] for n, one in answers.items()}
    assert said == {**texts, "canary": texts[SQL]}


def test_answers_go_on_when_an_engine_is_killed_and_the_next_has_them(
    platform: Platform, texts: dict[str, str], folder: Path
) -> None:
    # Whatever has become of the folder.
    shutil.rmtree(folder / "loras" / "poet")
    names = [SQL, POET, BASE] * 2
    with ThreadPoolExecutor(len(names)) as pool:
        streams = list(pool.map(lambda n: answer(platform, n, stream=True, max_tokens=120), names))
        begun = [next(stream).choices[0].text for stream in streams]
        replicas = model_state(platform, BASE)["replicas"]
        victim = max(replicas, key=lambda one: one["in_flight"])
        engine_process(victim).kill()
        rests = list(pool.map(ended_stream, streams))
    for name, first, rest in zip(names, begun, rests, strict=True):
        assert (first + rest).startswith(texts[name])

    def all_have_them() -> bool:
        model = model_state(platform, BASE)
        there = {one["id"] for one in model["replicas"]}
        return (
            len(there) == 2
            and victim["id"] not in there
            and all(set(one["replicas"]) == there for one in model["adapters"])
        )

    wait_for(all_have_them, BACK_S)


def test_they_outlive_the_controller(platform: Platform, texts: dict[str, str]) -> None:
    before = [(one["name"], one["digest"]) for one in model_state(platform, BASE)["adapters"]]
    kill_controller(platform)
    wait_for(lambda: bool(model_state(platform, BASE)["replicas"]), 30)
    after = [(one["name"], one["digest"]) for one in model_state(platform, BASE)["adapters"]]
    assert after == before
    assert text(platform, POET) == texts[POET]


def test_a_model_that_is_away_comes_for_its_adapter(
    platform: Platform, texts: dict[str, str]
) -> None:
    assert model_state(platform, AWAY)["status"] == "unloaded"
    assert text(platform, LATE) == texts[SQL]
    assert model_state(platform, AWAY)["status"] == "ready"
