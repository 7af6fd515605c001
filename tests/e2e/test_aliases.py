"""Aliases as clients and operators meet them: a canary, from its first request to its last."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.e2e.conftest import CLIENTS_TIMEOUT, COLD, HOT, Platform
from tests.e2e.test_admin import wait_for
from tests.e2e.test_batch import COMPLETIONS, ended, line, lines_of, submit
from tests.e2e.test_failures import kill_controller
from tests.e2e.test_kvstore import command

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

ALIAS = "chat"
# Gateways promise about a second; the machine that tests may be busy.
NOTICED_S = 5.0


def put(platform: Platform, value: object, name: str = ALIAS) -> Any:
    with platform.admin() as admin:
        return admin.put(f"/admin/v1/aliases/{name}", json=value)


def delete(platform: Platform, name: str = ALIAS) -> int:
    with platform.admin() as admin:
        return admin.delete(f"/admin/v1/aliases/{name}").status_code


@pytest.fixture(autouse=True)
def _no_alias_is_left(platform: Platform) -> Iterator[None]:
    yield
    with platform.admin() as admin:
        for alias in admin.get("/admin/v1/aliases").raise_for_status().json():
            delete(platform, alias["name"])


def answering(platform: Platform, key: str | None = None, **fields: Any) -> str:
    """The model that answers a request for the alias."""
    answer = platform.client(key).completions.create(
        model=ALIAS, prompt="Once upon a time", max_tokens=1, **fields
    )
    return answer.model


def set_up(platform: Platform, value: object) -> None:
    """Have the alias stand for something, and wait until the gateway knows."""
    assert put(platform, value).status_code == 200
    with platform.admin() as admin:
        wanted = admin.get(f"/admin/v1/aliases/{ALIAS}").json()
    with platform.http() as http:
        wait_for(
            lambda: http.get(f"/v1/models/{ALIAS}").json().get("models") == wanted["models"],
            NOTICED_S,
        )


def test_two_hundred_requests_are_split_by_weight(platform: Platform) -> None:
    set_up(platform, {HOT: 95, COLD: 5})
    counted = {
        model: platform.metric("loomserve_alias_requests_total", alias=ALIAS, model=model)
        for model in (HOT, COLD)
    }

    async def ask() -> Counter[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{platform.url}/v1",
            api_key=platform.key,
            max_retries=0,
            timeout=CLIENTS_TIMEOUT,
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.completions.create(model=ALIAS, prompt=f"{n} and", max_tokens=1)
                    for n in range(200)
                )
            )
        return Counter(answer.model for answer in answers)

    split = asyncio.run(ask())
    assert set(split) == {HOT, COLD}
    # Ten are expected, and more than 26 come once in 100,000 times.
    assert 1 <= split[COLD] <= 26
    for model, before in counted.items():
        after = platform.metric("loomserve_alias_requests_total", alias=ALIAS, model=model)
        assert after - before == split[model]
    assert platform.samples("loomserve_requests_total", model=ALIAS) == []


def story(platform: Platform, model: str, began: threading.Event | None = None) -> tuple[str, str]:
    """The text of a long stream, and the model that it names."""
    pieces, models = [], set()
    with platform.client().completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=120,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    ) as stream:
        for event in stream:
            models.add(event.model)
            pieces.append(event.choices[0].text)
            if began is not None:
                began.set()
    assert event.choices[0].finish_reason == "length"
    (named,) = models
    return "".join(pieces), named


def test_a_change_holds_for_new_requests_and_cuts_no_stream(platform: Platform) -> None:
    undisturbed = story(platform, HOT)
    set_up(platform, {HOT: 1})
    began = [threading.Event() for _ in range(4)]
    with ThreadPoolExecutor(len(began)) as pool:
        streams = [pool.submit(story, platform, ALIAS, each) for each in began]
        assert all(each.wait(30) for each in began)
        changed = time.monotonic()
        assert put(platform, {HOT: 0, COLD: 1}).json()["models"] == {HOT: 0, COLD: 1}
        wait_for(lambda: answering(platform) == COLD, NOTICED_S)
        noticed_s = time.monotonic() - changed
        running = sum(not stream.done() for stream in streams)
        assert {answering(platform) for _ in range(10)} == {COLD}
        assert [stream.result(120) for stream in streams] == [undisturbed] * len(streams)
    assert running, f"all streams had ended before anything changed, after {noticed_s:.1f} s"


def test_a_deleted_alias_is_unknown_and_its_streams_go_on(platform: Platform) -> None:
    set_up(platform, HOT)
    began = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        stream = pool.submit(story, platform, ALIAS, began)
        assert began.wait(30)
        assert delete(platform) == 200

        def unknown() -> bool:
            with platform.http() as http:
                return http.get(f"/v1/models/{ALIAS}").status_code == 404

        wait_for(unknown, NOTICED_S)
        with pytest.raises(openai.NotFoundError) as refused:
            answering(platform)
        assert refused.value.code == "model_not_found"
        assert refused.value.param == "model"
        assert f"'{ALIAS}' does not exist" in str(refused.value)
        assert stream.result(120)[1] == HOT
    assert delete(platform) == 404


def test_aliases_are_listed_for_clients_and_operators(platform: Platform) -> None:
    set_up(platform, {"models": {HOT: 95, COLD: 5}, "sticky": "key"})
    client = platform.client()
    assert {model.id for model in client.models.list()} == {HOT, COLD, ALIAS}
    card = client.models.retrieve(ALIAS)
    assert (card.id, card.object, card.models) == (ALIAS, "model", {HOT: 95, COLD: 5})  # type: ignore[attr-defined]
    (alias,) = platform.state()["aliases"]
    assert alias == {"name": ALIAS, "models": {HOT: 95, COLD: 5}, "sticky": "key"}
    shown = command(platform, "status")
    assert "Aliases" in shown
    assert "95.0" in shown


def test_keys_and_users_stay_with_their_model(platform: Platform) -> None:
    set_up(platform, {"models": {HOT: 1, COLD: 1}, "sticky": "key"})
    assert len({answering(platform) for _ in range(12)}) == 1
    assert put(platform, {"models": {HOT: 1, COLD: 1}, "sticky": "user"}).status_code == 200

    def of_users() -> list[str]:
        return [answering(platform, user=f"user-{n}") for n in range(12)]

    wait_for(lambda: len(set(of_users())) == 2, NOTICED_S)
    assert of_users() == of_users()


def test_an_alias_gives_a_narrow_key_nothing_more(platform: Platform) -> None:
    set_up(platform, {HOT: 1, COLD: 99})
    assert {answering(platform, platform.narrow_key) for _ in range(5)} == {HOT}
    assert {model.id for model in platform.client(platform.narrow_key).models.list()} == {
        HOT,
        ALIAS,
    }
    set_up(platform, COLD)
    with pytest.raises(openai.PermissionDeniedError, match=f"may not use model '{ALIAS}'"):
        answering(platform, platform.narrow_key)


@pytest.mark.parametrize(
    ("name", "value", "status", "says"),
    [
        (HOT, COLD, 409, "a model is named"),
        (ALIAS, "gpt-9", 400, "no model 'gpt-9'"),
        (ALIAS, {ALIAS: 1}, 400, "is an alias"),
        (ALIAS, {HOT: 0}, 400, "no model has a weight above 0"),
        (ALIAS, {HOT: "5"}, 400, "a whole number"),
        ("bad%20name", HOT, 400, "is no name"),
    ],
)
def test_what_cannot_be_is_refused(
    platform: Platform, name: str, value: object, status: int, says: str
) -> None:
    answer = put(platform, value, name)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]
    assert platform.state()["aliases"] == []


def test_no_model_is_loaded_under_an_aliass_name(platform: Platform) -> None:
    set_up(platform, HOT)
    with platform.admin() as admin:
        model = {"name": ALIAS, "source": "demo", "devices": ["core0"]}
        refused = admin.post("/admin/v1/models", json=model)
    assert refused.status_code == 409
    assert "is an alias" in refused.json()["error"]["message"]


def test_lines_of_a_batch_are_split_too(platform: Platform) -> None:
    set_up(platform, {HOT: 1, COLD: 1})
    client = platform.client()
    batch_id = submit(
        client, [line(f"line-{n}", COMPLETIONS, ALIAS) for n in range(20)], COMPLETIONS
    )
    batch = ended(client, batch_id, 120)
    answers = lines_of(client, batch.output_file_id)
    assert (len(answers), batch.error_file_id) == (20, None)
    # All of one model come once in 500,000 times.
    assert {one["response"]["body"]["model"] for one in answers.values()} == {HOT, COLD}


@pytest.mark.slow
def test_an_alias_survives_the_controller(platform: Platform) -> None:
    set_up(platform, {HOT: 0, COLD: 1})
    kill_controller(platform)
    (alias,) = platform.state()["aliases"]
    assert alias["models"] == {HOT: 0, COLD: 1}
    assert answering(platform) == COLD
    set_up(platform, {HOT: 1, COLD: 0})
    assert answering(platform) == HOT
