"""A cluster's nodes without devices in the file: all that they have, and models spread over it."""

from __future__ import annotations

import os

import pytest

from tests.cluster.cluster import Cluster
from tests.e2e.conftest import ENGINE, Platform

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(900)]

NAMES = ("one-model", "other", "third")


@pytest.fixture(scope="module")
def platform(two_nodes: Cluster) -> Platform:
    config = two_nodes.config()
    del config["devices"]
    model = {"source": "demo", "kv_cache_memory": "64MiB", "engine": ENGINE}
    config["models"] = {name: {**model, "replicas": 1} for name in NAMES}
    config["models"]["third"] = {**model, "start": "on_demand"}
    two_nodes.write(config)
    return two_nodes.serve()


def test_models_are_on_the_cores_of_both_nodes(platform: Platform, two_nodes: Cluster) -> None:
    state = platform.state()
    devices = {each["name"]: each for each in state["devices"]}
    cores = range(os.cpu_count() or 1)
    if len(cores) < 8:
        assert devices.keys() == {f"{node}-core{core}" for node in ("one", "two") for core in cores}
    assert {each["node"] for each in devices.values()} == {"one", "two"}
    models = {each["name"]: each for each in state["models"]}
    assert {models[name]["status"] for name in NAMES[:2]} == {"ready"}
    assert all("had the most room" in models[name]["placement"] for name in NAMES[:2])
    assert models["third"]["status"] == "unloaded"


def test_all_of_them_answer(platform: Platform) -> None:
    texts = {
        platform.client()
        .completions.create(
            model=name, prompt="Once upon", max_tokens=8, temperature=0, timeout=180
        )
        .choices[0]
        .text
        for name in NAMES
    }
    assert len(texts) == 1
    (third,) = (each for each in platform.state()["models"] if each["name"] == "third")
    assert "has least to do" in third["placement"]
