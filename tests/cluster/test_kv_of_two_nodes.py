"""A KV store on each of two nodes: an engine finds what any has, and prompts are handed over."""

from __future__ import annotations

import contextlib
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from loomserve.kvstore.server.actor import NodeStoreActor
from tests.cluster.cluster import MODEL, Cluster, until
from tests.cluster.test_two_nodes import drained, replicas, whole
from tests.e2e.conftest import Platform
from tests.e2e.prometheus import SCRAPE_S, answers, scraping
from tests.e2e.test_dashboards import NEVER, ONE_NODE, PANELS
from tests.unit.dashboards.catalog import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

# More than the 128 tokens of a prompt that is computed where it is answered.
PROMPTS, WORDS, TOKENS = 200, 160, 12
BACK_S = 300.0


@pytest.fixture(scope="module")
def platform(two_nodes: Cluster) -> Platform:
    config = two_nodes.config()
    config["kvstore"] = {"memory": "256MiB", "isolate_tenants": False}
    two_nodes.write(config)
    return two_nodes.serve()


def stores(platform: Platform) -> dict[str, Any]:
    with platform.admin() as admin:
        found: dict[str, Any] = admin.get("/admin/v1/kv").raise_for_status().json()["nodes"]
    return found


def acquainted(platform: Platform) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        peers = {name: one["network"]["peers"] for name, one in stores(platform).items()}
        return {name: [peer["node"] for peer in known] for name, known in peers.items()} == {
            "one": ["two"],
            "two": ["one"],
        }
    return False


def prompt(number: int, words: int = WORDS) -> str:
    return f"{number} {uuid.uuid4().hex} " + "The fox and the crow met once more. " * (words // 8)


def ask(platform: Platform, text: str, **more: Any) -> tuple[str, list[float]]:
    answer = platform.client().completions.create(
        model=MODEL,
        prompt=text,
        max_tokens=TOKENS,
        temperature=0,
        logprobs=0,
        extra_body={"ignore_eos": True, **more},
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    return choice.text, list(choice.logprobs.token_logprobs or [])


def alike(one: tuple[str, list[float]], other: tuple[str, list[float]]) -> bool:
    # A prompt of which some is known is computed in other batches, whose sums round otherwise.
    return one[0] == other[0] and one[1] == pytest.approx(other[1], abs=1e-3)


def set_roles(platform: Platform, **roles: str) -> None:
    with platform.admin() as admin:
        for device, replica in replicas(platform).items():
            path = f"/admin/v1/replicas/{replica['id']}/role"
            admin.put(path, json={"role": roles[device]}).raise_for_status()
    time.sleep(5)  # reports and routing statistics must have gone round


def test_each_nodes_store_knows_the_other(platform: Platform) -> None:
    until(lambda: acquainted(platform), 30)
    for name, one in stores(platform).items():
        assert one["network"]["node"] == name
        assert one["capacity_bytes"] == 256 * 2**20
    for node in ("one", "two"):
        assert platform.metric("loomserve_kv_capacity_bytes", node=node, tier="memory") > 0


def test_what_one_node_has_computed_another_fetches(platform: Platform) -> None:
    until(lambda: acquainted(platform), 30)
    text = prompt(0, words=400)
    with drained(platform, "core1"):
        expected = ask(platform, text)
    before = stores(platform)["two"]["network"]["fetched_blocks"]
    with drained(platform, "core0"):
        there = ask(platform, text)
    assert alike(there, expected)
    assert stores(platform)["two"]["network"]["fetched_blocks"] > before


def test_dashboards_show_what_nodes_fetch(platform: Platform, tmp_path: Path) -> None:
    until(lambda: acquainted(platform), 30)
    asked = [panel for page, panel in PANELS if NEVER.get((page, panel.question)) == ONE_NODE]
    assert asked
    with scraping(platform, tmp_path, ROOT / "dashboards/alerts.yaml") as prometheus:
        begin = time.time()
        for number in range(3):
            text = prompt(number, words=400)
            with drained(platform, "core1"):
                ask(platform, text)
            with drained(platform, "core0"):
                ask(platform, text)
        time.sleep(2 * SCRAPE_S)
        for query in (query for panel in asked for query in panel.queries):
            found = answers(prometheus, query, begin, time.time())
            assert found or "failed_fetches" in query.expr, query.expr


def test_a_flush_and_a_pin_are_of_all_nodes(platform: Platform) -> None:
    text = prompt(1, words=400)
    with platform.admin() as admin:
        pinned = admin.post(
            "/admin/v1/kv/pin", json={"model": MODEL, "prompt": text, "pinned": True}
        )
        assert pinned.raise_for_status().json()["blocks"] > 0
        admin.post("/admin/v1/kv/flush", json={}).raise_for_status()
        kept = admin.get("/admin/v1/kv").json()
        assert sum(of["blocks_in_memory"] for of in kept["models"]) > 0
        admin.post("/admin/v1/kv/pin", json={"model": MODEL, "prompt": text, "pinned": False})
        admin.post("/admin/v1/kv/flush", json={}).raise_for_status()
        left = admin.get("/admin/v1/kv").json()
    assert left["nodes"].keys() == {"one", "two"}
    assert sum(of["blocks_in_memory"] for of in left["models"]) == 0


def test_prompts_computed_on_one_node_are_answered_on_another_alike(platform: Platform) -> None:
    texts = [prompt(number) for number in range(PROMPTS)]
    with ThreadPoolExecutor(8) as threads:
        # What is asked under a salt of its own is found in no store.
        expected = list(threads.map(lambda text: ask(platform, text, cache_salt=text), texts))
        set_roles(platform, core0="prefill", core1="decode")
        try:
            ask(platform, prompt(PROMPTS))
            before = platform.metric("loomserve_handoffs_total", model=MODEL, outcome="continued")
            apart = list(threads.map(lambda text: ask(platform, text), texts))
            after = platform.metric("loomserve_handoffs_total", model=MODEL, outcome="continued")
            tokens = platform.metric("loomserve_handoff_tokens_total", model=MODEL, source="store")
        finally:
            set_roles(platform, core0="unified", core1="unified")
    assert [text for text, _ in apart] == [text for text, _ in expected]
    print(f"{after - before:.0f} of {PROMPTS} were handed over, with {tokens:.0f} tokens")
    assert after - before >= 0.9 * PROMPTS
    assert tokens > 0


def test_the_store_of_a_node_that_comes_back_is_known_again(
    platform: Platform, two_nodes: Cluster
) -> None:
    lost = two_nodes.nodes[1]
    text = prompt(2, words=400)
    with drained(platform, "core1"):
        expected = ask(platform, text)
    lost.machine.cut_power()
    until(lambda: stores(platform).keys() == {"one"}, 60, two_nodes.ray_logs)
    assert alike(ask(platform, text), expected)
    lost.machine.boot()
    lost.start()
    until(lambda: whole(platform), BACK_S, two_nodes.ray_logs)
    until(lambda: acquainted(platform), 60, two_nodes.ray_logs)
    with drained(platform, "core0"):
        assert ask(platform, text)[0] == expected[0]
    assert stores(platform)["two"]["network"]["fetched_blocks"] > 0


def test_the_stores_end_with_the_platform(platform: Platform, two_nodes: Cluster) -> None:
    assert two_nodes.end_serve() == 0, two_nodes.log.read_text()[-2000:]
    for node in two_nodes.nodes:
        titles = [" ".join(one.cmdline()) for one in node.machine.processes()]
        assert not [title for title in titles if NodeStoreActor.__name__ in title]
        assert node.machine.output("sh", "-c", "ls /dev/shm/loomserve-0 2>/dev/null || true") == ""
