"""Clients that leave and engines that die."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import psutil
import pytest

from loomserve.platform.engine.process.policy.silence import WEDGED_S
from loomserve.platform.front_end.policy.continuation import ContinuationBounds
from tests.e2e.conftest import COLD, COLD_MODEL, HOT, Platform, simulated
from tests.e2e.test_admin import ask, model_state, wait_for
from tests.e2e.traced import Traced, events, told
from tests.forks import descendants
from tests.unit.platform.tracing.collector import Collector
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.e2e, pytest.mark.simulated]

CONTROLLER_BACK_S = 30
ORPHANS_END_S = 15
REROUTE_S = ContinuationBounds().reroute_timeout_s


def long_stream(platform: Platform, model: str, tokens: int = 900, **headers: str) -> openai.Stream:
    return platform.client().completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
        extra_headers=headers,
    )


def rest_of(stream: openai.Stream) -> tuple[int, openai.APIError | None]:
    """How many tokens the whole stream has, or the error that it ended with."""
    completed = 0
    try:
        for event in stream:
            completed = event.usage.completion_tokens if event.usage else completed
    except openai.APIError as error:
        return 0, error
    return completed, None


def engine_process(replica: dict[str, Any]) -> psutil.Process:
    return psutil.Process(replica["engine_pid"])


def test_a_client_that_leaves_has_its_request_aborted_within_a_second(platform: Platform) -> None:
    stream = long_stream(platform, COLD)
    next(iter(stream))
    # An engine says once a second what it has.
    wait_for(lambda: platform.metric("vllm:num_requests_running", model=COLD) == 1, 2)
    stream.close()
    wait_for(lambda: platform.metric("vllm:num_requests_running", model=COLD) == 0, 2)
    assert platform.metric("loomserve_client_disconnects_total", model=COLD) >= 1


def test_a_killed_only_engine_holds_its_stream_until_another_comes_and_not_for_ever(
    platform: Platform,
) -> None:
    stream = long_stream(platform, COLD, 160)
    next(iter(stream))
    replica = held(platform, COLD)
    process = psutil.Process(replica["pid"])
    engine_process(replica).kill()
    began = time.monotonic()
    assert ask(platform, HOT), "another model stopped serving"
    assert psutil.wait_procs([process], timeout=ORPHANS_END_S)[1] == []
    # The machine decides whether another engine is there in time.
    completed, error = rest_of(stream)
    if error is None:
        assert completed == 160
    else:
        assert "no replica" in str(error)
        assert REROUTE_S - 1 < time.monotonic() - began < REROUTE_S + PATIENCE_S
    wait_for(lambda: replica["id"] not in replica_ids(platform, COLD), 60)
    wait_for(lambda: model_state(platform, COLD)["status"] == "ready", 240)
    assert ask(platform, COLD)


@pytest.mark.slow
def test_an_engine_that_is_stopped_for_ever_is_killed_and_another_answers(
    platform: Platform,
) -> None:
    assert ask(platform, COLD)
    (replica,) = model_state(platform, COLD)["replicas"]
    engine = engine_process(replica)
    engine.suspend()
    wait_for(lambda: not engine.is_running(), WEDGED_S)
    wait_for(lambda: replica["id"] not in replica_ids(platform, COLD), 60)
    with platform.admin() as admin:
        said = admin.get("/admin/v1/events").raise_for_status().json()["events"]
    why = f"replica {replica['id']} kills its engine: its process is stopped"
    assert any(each["model"] == COLD and each["why"].startswith(why) for each in said)
    wait_for(lambda: model_state(platform, COLD)["status"] == "ready", 240)
    assert ask(platform, COLD)


def held(platform: Platform, model: str, before: int = 0) -> dict[str, Any]:
    """A replica with a process of Serve's of its own; an engine serves before that is there."""

    def found() -> dict[str, Any] | None:
        replicas = model_state(platform, model)["replicas"]
        own = "ray::ServeReplica:model:"
        for each in replicas:
            if each["pid"] != before and command_line(psutil.Process(each["pid"])).startswith(own):
                return dict(each)
        return None

    wait_for(lambda: found() is not None, 240)
    replica = found()
    assert replica is not None
    return replica


def test_a_stream_goes_on_whose_replicas_process_is_killed(platform: Platform) -> None:
    replica = held(platform, COLD)
    stream = long_stream(platform, COLD, 160)
    next(iter(stream))
    psutil.Process(replica["pid"]).kill()
    assert rest_of(stream) == (160, None)
    again = held(platform, COLD, before=replica["pid"])
    assert (again["id"], again["engine_pid"]) == (replica["id"], replica["engine_pid"])
    assert ask(platform, COLD)


def test_requests_of_a_model_survive_the_death_of_one_engine(
    platform: Platform, collector: Collector
) -> None:
    traces = [Traced() for _ in range(4)]
    streams = [long_stream(platform, HOT, 200, **each.headers) for each in traces]
    for stream in streams:
        next(iter(stream))
    replica = model_state(platform, HOT)["replicas"][0]
    engine = engine_process(replica)
    engines = [engine, *engine.children(recursive=True)]
    engine.kill()
    for _ in range(10):
        ask(platform, HOT)
    assert [rest_of(stream) for stream in streams] == [(200, None)] * len(streams)
    moved = [found for each in traces if (found := moves(collector, each))]
    assert moved, "all were with the other replica"
    assert {(first, why) for first, _, why in moved} == {(replica["id"], "gone")}
    assert psutil.wait_procs(engines, timeout=ORPHANS_END_S)[1] == []
    wait_for(lambda: replica["id"] not in replica_ids(platform, HOT), 60)


def moves(collector: Collector, trace: Traced) -> tuple[str, str, str] | None:
    """From where to where a request went on, and why; None: it stayed.

    One that stays has a span of vLLM's; of two stays the first engine is gone with its own.
    """
    name = "POST /v1/completions"
    wait_for(lambda: any(each.name == name for each in collector.of(trace.id)), 30)
    (request,) = (each for each in collector.of(trace.id) if each.name == name)
    went = [what for event, what in events(request) if event == "continuation"]
    stays = ["answer"] * (1 + len(went))
    spans = trace.spans(collector, name, *stays, "llm_request")
    if not went:
        return None
    (what,) = went
    first, second = (told(each) for each in spans if each.name == "answer")
    assert (first["replica"], second["replica"]) == (what["from"], what["to"])
    assert (first["left"], second["left"]) == (what["why"], "finished")
    assert 0 < first["tokens"] < second["tokens"] == 200
    return what["from"], what["to"], what["why"]


def command_line(process: psutil.Process) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def kill_controller(platform: Platform) -> None:
    """Serve starts another one, which is waited for."""

    def controllers() -> set[int]:
        return {
            process.pid
            for process in descendants(platform.process)
            if "loomserve-controller" in command_line(process)
        }

    (killed,) = controllers()
    psutil.Process(killed).kill()
    wait_for(lambda: bool(controllers() - {killed}) and answers(platform), CONTROLLER_BACK_S)


def answers(platform: Platform) -> bool:
    try:
        return bool(platform.state())
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_an_unload_during_which_the_controller_dies_is_carried_out(platform: Platform) -> None:
    stream = long_stream(platform, COLD)
    next(iter(stream))
    with platform.admin() as admin:
        admin.delete(f"/admin/v1/models/{COLD}?timeout_s=5").raise_for_status()
        kill_controller(platform)
        wait_for(lambda: model_state(platform, COLD) is None, 30)
        stream.close()
        kill_controller(platform)
        assert model_state(platform, COLD) is None, "it stays unloaded"
        assert ask(platform, HOT)
        admin.post("/admin/v1/models", json=simulated(COLD_MODEL)).raise_for_status()
        # The wish outlives the controller before Serve knows of the model.
        kill_controller(platform)
    wait_for(lambda: model_state(platform, COLD)["status"] == "ready", 240)
    assert ask(platform, COLD)


@pytest.mark.slow
def test_what_an_operator_has_switched_survives_the_controller(platform: Platform) -> None:
    with platform.admin() as admin:
        path = f"/admin/v1/models/{HOT}/replicas"
        admin.put(path, json={"replicas": 1}).raise_for_status()
        kill_controller(platform)
        assert model_state(platform, HOT)["target_replicas"] == 1
        wait_for(lambda: len(replica_ids(platform, HOT)) == 1, 30)
        (left,) = replica_ids(platform, HOT)
        drain = f"/admin/v1/replicas/{left}/draining"
        admin.put(drain, json={"draining": True}).raise_for_status()
        kill_controller(platform)
        wait_for(lambda: replica_ids(platform, HOT) == [left], 10)
        assert model_state(platform, HOT)["replicas"][0]["draining"]
        admin.put(drain, json={"draining": False}).raise_for_status()
        admin.put(path, json={"replicas": 2}).raise_for_status()
        kill_controller(platform)
    wait_for(lambda: model_state(platform, HOT)["status"] == "ready", 240)
    assert len(replica_ids(platform, HOT)) == 2
    assert ask(platform, HOT)


def replica_ids(platform: Platform, model: str) -> list[str]:
    return [replica["id"] for replica in model_state(platform, model)["replicas"]]
