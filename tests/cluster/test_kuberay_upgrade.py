"""An upgrade as KubeRay makes it: the next cluster must run before the last one may end.

Both have one claim, so of each file that one process alone may have the last cluster's has it: the
next one's batch lane and controller wait for that on standby, and are well meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from tests.cluster.cluster import MODEL, READY_S, until
from tests.cluster.kuberay import Pod, ray_cluster
from tests.cluster.nodes import network
from tests.cluster.test_kuberay import KEY, Cluster, claim, config, manifests, serve_config
from tests.e2e.test_batch import COMPLETIONS, line, lines_of, submit

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1200)]

LINES, TOKENS = 900, 48
"""More than one core answers before the last cluster has ended."""


def deploy(cluster: Cluster) -> None:
    """Until KubeRay would move traffic to it."""
    until(cluster.operator.answers, 240, cluster.why_not)
    put = cluster.operator.update_deployments(serve_config(cluster.rendered, cluster.head))
    assert put.status_code == 200, put.text
    until(cluster.operator.moves_traffic, READY_S, cluster.why_not)


def admin(cluster: Cluster, path: str) -> httpx.Response:
    url = f"{cluster.url(cluster.head)}/admin/v1/{path}"
    return httpx.get(url, headers=cluster.admin, timeout=20)


def said(cluster: Cluster, path: str) -> Any:
    return admin(cluster, path).raise_for_status().json()


def client(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url(cluster.worker)}/v1", api_key=KEY)


def test_the_next_cluster_runs_beside_the_last_and_goes_on_with_its_batch(tmp_path: Path) -> None:
    text = yaml.safe_dump({**yaml.safe_load(config()), "rebalancing": {}})
    rendered = manifests(text)
    first, second = claim(tmp_path / "first"), tmp_path / "second"
    second.mkdir()
    (second / "lib").symlink_to(first / "lib")
    with network("head", "one", "head", "one") as machines:
        last_pods, next_pods = machines[:2], machines[2:]
        with ray_cluster(rendered, last_pods, first) as pods:
            last = Cluster(pods, rendered)
            deploy(last)
            lines = [
                line(str(number), COMPLETIONS, MODEL, max_tokens=TOKENS) for number in range(LINES)
            ]
            batch = submit(client(last), lines, COMPLETIONS)
            with ray_cluster(rendered, next_pods, second, "loom-fghij") as pods:
                following = Cluster(pods, rendered)
                begin = time.monotonic()
                deploy(following)
                took_s = time.monotonic() - begin
                assert [each.ask(4).status_code for each in (last, following)] == [200, 200]
                standby = admin(following, "batches")
                assert (standby.status_code, standby.json()["error"]["code"]) == (
                    503,
                    "batch_lane_away",
                )
                assert "another controller" in said(following, "rebalancing")["problem"]
                answered = said(last, "batches")["batches"][0]["completed"]
                assert 0 < answered < LINES
                with ThreadPoolExecutor(2) as pool:  # Kubernetes tells all at once
                    list(pool.map(Pod.end, (last.worker, last.head)))
                until(
                    lambda: admin(following, "batches").status_code == 200, 120, following.why_not
                )
                left = LINES - said(following, "batches")["batches"][0]["completed"]
                assert left > 0
                until(lambda: not said(following, "rebalancing")["problem"], 60, following.why_not)
                asked = client(following)
                until(
                    lambda: asked.batches.retrieve(batch).status == "completed",
                    600,
                    following.why_not,
                )
                ended = asked.batches.retrieve(batch)
                answers = lines_of(asked, ended.output_file_id)
    print(
        f"ran after {took_s:.0f} s beside the last cluster, which had answered {answered} of "
        f"{LINES} lines, and left {left} of them"
    )
    assert answers.keys() == {str(number) for number in range(LINES)}
