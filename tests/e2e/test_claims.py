"""What README.md claims of models unlike those of the shared platform, loaded beside them.

Other files hold what else there is to each, on platforms of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from loomserve.platform.models import catalog
from tests.e2e.conftest import COLD, ENGINE, Platform
from tests.e2e.test_admin import model_state, wait_for
from tests.families import DEMO_EMBEDDINGS
from tests.peft_folders import write_adapter

pytestmark = pytest.mark.e2e

NAME = "claimed"
PROMPT = "Once upon a time there was a fox who lived in a wood, and each morning " * 4
TOKENS = 24
START_S = 240.0


@contextmanager
def loaded(platform: Platform, status: str = "ready", **model: Any) -> Iterator[None]:
    """A model beside the platform's own, of which there is nothing left afterwards."""
    given = {
        "name": NAME,
        "source": "demo",
        "devices": ["core0"],
        "kv_cache_memory": "64MiB",
        "engine": ENGINE,
        **model,
    }
    with platform.admin() as admin:
        admin.post("/admin/v1/models", json=given).raise_for_status()
        wait_for(lambda: shown(platform) == status, START_S, platform.state)
        yield
        admin.delete(f"/admin/v1/models/{NAME}").raise_for_status()
        wait_for(lambda: model_state(platform, NAME) is None, START_S, platform.state)


def shown(platform: Platform) -> str:
    state = model_state(platform, NAME)
    return str(state and state["status"])


def text(platform: Platform, model: str = NAME, prompt: str = PROMPT, tokens: int = TOKENS) -> str:
    answer = platform.client().completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        timeout=START_S,
    )
    return answer.choices[0].text


@pytest.mark.claim("pipeline")
def test_a_model_over_two_devices_answers_as_on_one(platform: Platform) -> None:
    with loaded(platform, devices=["core0", "core1"], pipeline={"layers": [21, 9]}, kvstore=False):
        assert text(platform) == text(platform, COLD)


SENTENCES = (
    "A small dog runs through the garden.",
    "In the yard a puppy is running about.",
    "The price of copper fell for the third week.",
)


@pytest.mark.claim("embeddings")
def test_the_demo_model_embeds_as_transformers_does_and_tells_near_from_far(
    platform: Platform,
) -> None:
    engine = {"enforce_eager": True, "dtype": "float32"}
    body = {"model": NAME, "input": [*SENTENCES]}
    with loaded(platform, source=DEMO_EMBEDDINGS, engine=engine), platform.http() as http:
        answered = http.post("/v1/embeddings", json=body, timeout=200).raise_for_status().json()
    assert answered["usage"]["prompt_tokens"] > len(SENTENCES)
    found = torch.tensor([each["embedding"] for each in answered["data"]])
    assert torch.allclose(found, _by_transformers(), atol=1e-4)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.5 > 0.2 > far


def _by_transformers() -> torch.Tensor:
    folder = catalog.resolve(DEMO_EMBEDDINGS, Path())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    bert = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    given = tokenizer([*SENTENCES], padding=True, return_tensors="pt")
    with torch.inference_mode():
        states = bert(**given).last_hidden_state
    mask = given["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.fixture(scope="module")
def claimed(platform: Platform, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One with all these features, once it is asked for; and another of its adapters."""
    folder = tmp_path_factory.mktemp("adapters")
    base = catalog.resolve("demo", folder)
    assert isinstance(base, Path)
    one, two = (write_adapter(folder / f"{seed}", base, seed=seed) for seed in range(2))
    adapters = {"max_loras": 2, "max_lora_rank": 16, "load": [{"name": "one", "source": str(one)}]}
    scheduling = {"queue": "fair", "preemption": "swap"}
    given = {"start": "on_demand", "adapters": adapters, "scheduling": scheduling}
    with loaded(platform, "unloaded", **given):
        yield two


@pytest.mark.claim("sleep and wake")
def test_a_model_comes_when_it_is_asked_for_and_wakes_with_its_tokens(
    platform: Platform, claimed: Path
) -> None:
    expected = text(platform, COLD)
    assert text(platform) == expected
    (before,) = model_state(platform, NAME)["replicas"]
    with platform.admin() as admin:
        path = f"/admin/v1/models/{NAME}/sleep"
        # As soon as its last heartbeat knows of no request.
        wait_for(lambda: admin.post(path).status_code == 200, 60)
    wait_for(lambda: shown(platform) == "asleep", 60)
    assert text(platform) == expected
    (after,) = model_state(platform, NAME)["replicas"]
    assert (after["engine_pid"], after["asleep"]) == (before["engine_pid"], False)


@pytest.mark.claim("adapters")
def test_adapters_answer_under_their_names_each_with_tokens_of_its_own(
    platform: Platform, claimed: Path
) -> None:
    assert text(platform) == text(platform, COLD)
    first = text(platform, "one")
    with platform.admin() as admin:
        path = f"/admin/v1/models/{NAME}/adapters/two"
        admin.put(path, json={"source": str(claimed)}).raise_for_status()
    wait_for(lambda: "two" in {card.id for card in platform.client().models.list()}, 60)
    assert len({text(platform), first, text(platform, "two")}) == 3
    assert text(platform, "one") == first


@pytest.mark.claim("swap and fair queue")
def test_requests_of_a_fair_queue_swap_and_get_the_tokens_of_those_with_room(
    platform: Platform, claimed: Path
) -> None:
    # At their ends far more tokens than the engine's memory holds.
    prompts = [f"Tale {number}. {PROMPT}" for number in range(12)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda each: text(platform, NAME, each, 64), prompts))
        alone = list(pool.map(lambda each: text(platform, COLD, each, 64), prompts))
    assert together == alone
    assert platform.metric("loomserve_preemptions_total", model=NAME, mode="swap") > 0

    def scheduling() -> dict[str, Any]:
        (replica,) = model_state(platform, NAME)["replicas"]
        return dict(replica["load"]["scheduling"])

    wait_for(lambda: scheduling()["swapped_out"] > 0, 60)
    assert scheduling()["queue"] == "fair"
    assert scheduling()["swapped_out"] == scheduling()["swapped_in"]
