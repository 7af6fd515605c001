"""More models than memory: requests wake and load them, and others make room."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import ENGINE, Platform, server_section, simulated, started
from tests.e2e.traced import Traced, seconds, told, tracing
from tests.forks import descendants
from tests.unit.platform.tracing.collector import Collector
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

FIRST, SECOND, THIRD, LARGE = "first", "second", "third", "large"
RESIDENCE_S = 1.0
# No two are ready together, and one that sleeps fits beside one that is ready.
SIZE, BUDGET = "4GiB", "7GiB"


def model(name: str, size: str = SIZE, **changes: Any) -> dict[str, Any]:
    given = {"name": name, "devices": ["core0"], "engine": ENGINE, "start": "on_demand", **changes}
    # Comments come while it starts.
    return simulated(given, memory=size, start_s=1.5)


def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    return {
        "devices": [
            {"name": "core0", "cores": [0], "memory": BUDGET},
            {"name": "core1", "cores": [min(1, (os.cpu_count() or 1) - 1)]},
        ],
        "models": [
            model(FIRST, start="now"),
            model(SECOND, idle={"sleep_after_s": 6, "unload_after_s": None}),
            model(THIRD),
            model(LARGE, "6.9GiB"),
        ],
        "elastic": {"residence_s": RESIDENCE_S, "comment_s": 0.2, "wait_timeout_s": 180},
        "server": server_section(port, hashes),
    }


@pytest.fixture(scope="module")
def platform(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    def traced(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        config = configured(port, hashes)
        config["server"]["tracing"] = tracing(collector)
        return config

    with started(tmp_path_factory.mktemp("on_demand"), traced) as running:
        yield running


def status(platform: Platform, name: str) -> str:
    with platform.http() as client:
        cards = client.get("/v1/models").raise_for_status().json()["data"]
    return str({card["id"]: card["status"] for card in cards}[name])


def state_of(platform: Platform, name: str) -> dict[str, Any]:
    return next(each for each in platform.state()["models"] if each["name"] == name)


def until(holds: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


def ask(platform: Platform, name: str, tokens: int = 8, **headers: str) -> str:
    answer = platform.client().completions.create(
        model=name,
        prompt="Once upon a time there was",
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True},
        extra_headers=headers,
        timeout=200,
    )
    return answer.choices[0].text


def admin(platform: Platform, name: str, what: str) -> httpx.Response:
    with platform.admin() as client:
        return client.post(f"/admin/v1/models/{name}/{what}")


def put_to_sleep(platform: Platform, name: str) -> None:
    """Have it there, and asleep."""
    ask(platform, name, tokens=1)
    until(lambda: admin(platform, name, "sleep").status_code == 200)
    until(lambda: status(platform, name) == "asleep")


@pytest.fixture(scope="module")
def text(platform: Platform) -> str:
    """What all of them answer, which are one model under several names."""
    return ask(platform, FIRST)


def test_all_models_are_listed_with_their_states(platform: Platform, text: str) -> None:
    names = (FIRST, SECOND, THIRD, LARGE)
    assert {name: status(platform, name) for name in names} == {
        FIRST: "ready", SECOND: "unloaded", THIRD: "unloaded", LARGE: "unloaded",
    }  # fmt: skip
    assert platform.metric("loomserve_model_state", model=SECOND, state="unloaded") == 1
    assert platform.metric("loomserve_model_state", model=SECOND, state="ready") == 0


def test_a_request_loads_a_model_while_another_falls_asleep_for_it(
    platform: Platform, text: str
) -> None:
    assert ask(platform, SECOND) == text
    assert (status(platform, FIRST), status(platform, SECOND)) == ("asleep", "ready")
    assert state_of(platform, FIRST)["message"].startswith(f"{SECOND} needs its memory")


def test_a_request_wakes_a_model_and_its_answer_is_as_before(
    platform: Platform, text: str, collector: Collector
) -> None:
    put_to_sleep(platform, FIRST)
    (asleep,), trace = state_of(platform, FIRST)["replicas"], Traced()
    assert ask(platform, FIRST, **trace.headers) == text
    until(lambda: status(platform, FIRST) == "ready")
    # It is the engine that slept, and no other was started.
    (awake,) = state_of(platform, FIRST)["replicas"]
    assert awake["engine_pid"] == asleep["engine_pid"]
    names = ("POST /v1/completions", "wait_for_model", "answer", "llm_request")
    request, wait, answer, _ = trace.spans(collector, *names)
    assert told(wait) == {"model": FIRST}
    assert 0 < seconds(wait) < seconds(request)
    assert wait.end_time_unix_nano <= answer.start_time_unix_nano


def test_a_stream_hears_comments_until_its_model_has_come(platform: Platform, text: str) -> None:
    put_to_sleep(platform, FIRST)
    until(lambda: admin(platform, THIRD, "unload").status_code == 200)
    until(lambda: status(platform, THIRD) == "unloaded")
    body = {"model": THIRD, "prompt": "Once upon a time there was", "max_tokens": 8,
            "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip

    def told_openai() -> str:
        """OpenAI's own client passes over them."""
        chunks = platform.client().completions.create(
            model=THIRD, prompt="Once upon a time there was", max_tokens=8, temperature=0,
            stream=True, extra_body={"ignore_eos": True}, timeout=200,
        )  # fmt: skip
        return "".join(chunk.choices[0].text for chunk in chunks)

    with (
        ThreadPoolExecutor(1) as pool,
        platform.http() as client,
        client.stream("POST", "/v1/completions", json=body, timeout=200) as response,
    ):
        assert response.status_code == 200
        until(lambda: status(platform, THIRD) == "loading")
        other = pool.submit(told_openai)
        lines = [line for line in response.iter_lines() if line]
        assert other.result() == text
    comments = [line for line in lines if line.startswith(":")]
    assert len(comments) > 3
    assert lines[: len(comments)] == comments, "comments come before the answer, and not in it"
    assert lines[-1] == "data: [DONE]"


def test_an_error_after_comments_is_an_event_of_the_stream(platform: Platform) -> None:
    put_to_sleep(platform, FIRST)
    until(lambda: admin(platform, THIRD, "unload").status_code == 200)
    body = {"model": THIRD, "prompt": "x", "max_tokens": 10**6, "stream": True}
    with (
        platform.http() as client,
        client.stream("POST", "/v1/completions", json=body, timeout=200) as response,
    ):
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line]
    assert lines[0].startswith(":")
    assert '"invalid_request_error"' in lines[-1]
    with pytest.raises(openai.BadRequestError):
        ask(platform, THIRD, tokens=10**6)


def actors(platform: Platform, what: str) -> list[psutil.Process]:
    """Ray's processes of Serve's replicas of an application."""
    title = f"ray::ServeReplica:{what}"
    return [each for each in descendants(platform.process) if _title(each).startswith(title)]


def _title(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return ""


def test_only_an_engine_that_serves_has_an_actor(platform: Platform, text: str) -> None:
    ask(platform, FIRST)
    until(lambda: len(actors(platform, f"model:{FIRST}")) == 1)
    put_to_sleep(platform, FIRST)
    (asleep,) = state_of(platform, FIRST)["replicas"]
    until(lambda: not actors(platform, f"model:{FIRST}"))
    assert status(platform, FIRST) == "asleep"
    assert ask(platform, FIRST) == text
    until(lambda: len(actors(platform, f"model:{FIRST}")) == 1)
    (awake,) = state_of(platform, FIRST)["replicas"]
    assert (awake["id"], awake["engine_pid"]) == (asleep["id"], asleep["engine_pid"])
    assert ask(platform, FIRST) == text


def test_engines_come_back_whose_nodes_actor_is_killed(platform: Platform, text: str) -> None:
    put_to_sleep(platform, FIRST)
    assert ask(platform, THIRD) == text
    (slept,), (served,) = (state_of(platform, name)["replicas"] for name in (FIRST, THIRD))
    engines = [psutil.Process(each["engine_pid"]) for each in (slept, served)]
    (host,) = actors(platform, "loomserve-engines")
    host.kill()
    assert psutil.wait_procs(engines, PATIENCE_S)[1] == []
    assert ask(platform, THIRD) == text
    # The one that slept is started anew, and sleeps again.
    until(lambda: status(platform, FIRST) == "asleep" and is_another(platform, slept))
    assert ask(platform, FIRST) == text


def is_another(platform: Platform, before: dict[str, Any]) -> bool:
    replicas = state_of(platform, FIRST)["replicas"]
    return [each["id"] for each in replicas] not in ([], [before["id"]])


def test_fifty_requests_at_once_wake_a_model_once(platform: Platform, text: str) -> None:
    put_to_sleep(platform, FIRST)
    (replica,) = state_of(platform, FIRST)["replicas"]
    waited = lambda: platform.metric(  # noqa: E731
        "loomserve_model_wait_seconds_count", model=FIRST, outcome="ready"
    )
    before = waited()
    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(lambda _: ask(platform, FIRST), range(50)))
    assert set(answers) == {text}
    assert waited() > before
    assert [each["id"] for each in state_of(platform, FIRST)["replicas"]] == [replica["id"]]
    until(lambda: status(platform, FIRST) == "ready")


def test_what_can_never_have_room_is_refused_at_once(platform: Platform) -> None:
    began = time.monotonic()
    with pytest.raises(openai.APIStatusError) as refused:
        ask(platform, LARGE)
    # Were it to wait, that would be longer.
    assert time.monotonic() - began < PATIENCE_S
    assert (refused.value.status_code, refused.value.code) == (503, "no_room")
    assert int(refused.value.response.headers["Retry-After"]) >= 1
    assert "device core0 may give models" in refused.value.message


def test_one_that_has_requests_makes_room_once_they_have_ended_and_no_stream_is_cut(
    platform: Platform, text: str
) -> None:
    ask(platform, FIRST, tokens=1)
    stream = platform.client().completions.create(
        model=FIRST, prompt="Once", max_tokens=200, temperature=0, stream=True,
        stream_options={"include_usage": True}, extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = iter(stream)
    next(chunks)
    time.sleep(2.5)  # the engine's next heartbeat tells that it has a request
    assert admin(platform, FIRST, "sleep").status_code == 409
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(ask, platform, SECOND)
        # The one that gives way has another request meanwhile, which waits for its turn.
        until(lambda: status(platform, FIRST) == "asleep")
        again = pool.submit(ask, platform, FIRST)
        *_, last = chunks
        assert last.usage is not None
        assert last.usage.completion_tokens == 200
        assert (other.result(), again.result()) == (text, text)


def test_an_engine_that_is_killed_while_it_wakes_leaves_nobody_waiting(
    platform: Platform, text: str
) -> None:
    put_to_sleep(platform, FIRST)
    for name in (SECOND, THIRD):
        until(lambda name=name: admin(platform, name, "unload").status_code == 200)
        until(lambda name=name: status(platform, name) == "unloaded")
    (replica,) = state_of(platform, FIRST)["replicas"]
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, platform, FIRST) for _ in range(8)]
        psutil.Process(replica["engine_pid"]).kill()
        ended = [_outcome(each) for each in asked]
    assert all(each == text or each.startswith("50") for each in ended), ended
    until(lambda: ask(platform, FIRST) == text)


def _outcome(asked: Future[str]) -> str:
    try:
        return asked.result(timeout=200)
    except openai.APIStatusError as error:
        return f"{error.status_code} {error.code}"


def test_requests_that_wait_for_a_model_that_is_unloaded_end_at_once(platform: Platform) -> None:
    until(lambda: admin(platform, THIRD, "unload").status_code == 200)
    until(lambda: status(platform, THIRD) == "unloaded")
    failed: list[tuple[int, float]] = []

    def waits() -> None:
        try:
            ask(platform, THIRD)
        except openai.APIStatusError as error:
            failed.append((error.status_code, time.monotonic()))

    waiting = threading.Thread(target=waits)
    waiting.start()
    until(lambda: status(platform, THIRD) == "loading")
    with platform.admin() as client:
        client.delete(f"/admin/v1/models/{THIRD}").raise_for_status()
    deleted_at = time.monotonic()
    waiting.join(PATIENCE_S)
    ((code, at),) = failed
    assert code == 404
    # Not when their own time is over.
    assert at - deleted_at < PATIENCE_S
    until(lambda: THIRD not in [each["name"] for each in platform.state()["models"]], 120)


def test_an_idle_model_sleeps_by_itself(platform: Platform) -> None:
    ask(platform, SECOND, tokens=1)
    until(lambda: status(platform, SECOND) == "asleep", 20)
    assert state_of(platform, SECOND)["message"].startswith("idle for ")


def test_operators_have_a_port_of_their_own(platform: Platform) -> None:
    """That of clients does not even say that there is more."""
    paths = ("/admin/v1/state", "/metrics", "/console/")
    with platform.admin() as operators, platform.http(platform.admin_token) as public:
        assert operators.base_url != public.base_url
        assert [operators.get(path).status_code for path in paths] == [200] * len(paths)
        assert [public.get(path).status_code for path in paths] == [404] * len(paths)
        assert [each.get("/ready").status_code for each in (operators, public)] == [200, 200]
    with platform.http() as clients:
        assert clients.get("/v1/models").status_code == 200
        # The console's chat asks as clients do.
        asked = clients.get(f"{platform.operators_url}/v1/models")
        assert asked.json() == clients.get("/v1/models").json()
