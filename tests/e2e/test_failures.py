"""Clients that leave and engines that die."""

from __future__ import annotations

import time

import openai
import psutil
import pytest

from tests.e2e.conftest import COLD, HOT, Platform
from tests.e2e.test_admin import ask, model_state, wait_for

pytestmark = pytest.mark.e2e


def long_stream(platform: Platform, model: str) -> openai.Stream:
    return platform.client().completions.create(
        model=model,
        prompt="Once upon a time",
        max_tokens=900,
        stream=True,
        extra_body={"ignore_eos": True},
    )


def engine_process(platform: Platform, replica: dict[str, object]) -> psutil.Process:
    children = psutil.Process(replica["pid"]).children(recursive=True)
    return next(child for child in children if "EngineCore" in " ".join(child.cmdline()))


def test_a_client_that_leaves_has_its_request_aborted_within_a_second(platform: Platform) -> None:
    stream = long_stream(platform, COLD)
    next(iter(stream))
    assert platform.metric("vllm:num_requests_running", model=COLD) == 1
    stream.close()
    wait_for(lambda: platform.metric("vllm:num_requests_running", model=COLD) == 0, 1.5)
    assert platform.metric("loomserve_client_disconnects_total", model=COLD) >= 1


def test_a_killed_engine_ends_its_stream_with_an_error_and_comes_back(platform: Platform) -> None:
    stream = long_stream(platform, COLD)
    next(iter(stream))
    replica = model_state(platform, COLD)["replicas"][0]
    engine_process(platform, replica).kill()
    began = time.monotonic()
    with pytest.raises(openai.APIError):
        for _ in stream:
            pass
    assert time.monotonic() - began < 15, "the stream hung"
    assert ask(platform, HOT), "another model stopped serving"
    wait_for(lambda: replica["id"] not in replica_ids(platform, COLD), 60)
    wait_for(lambda: model_state(platform, COLD)["status"] == "ready", 240)
    assert ask(platform, COLD)


def test_requests_of_a_model_survive_the_death_of_one_replica(platform: Platform) -> None:
    replica = model_state(platform, HOT)["replicas"][0]
    psutil.Process(replica["pid"]).kill()
    for _ in range(10):
        ask(platform, HOT)
    wait_for(lambda: replica["id"] not in replica_ids(platform, HOT), 60)


def replica_ids(platform: Platform, model: str) -> list[str]:
    return [replica["id"] for replica in model_state(platform, model)["replicas"]]
