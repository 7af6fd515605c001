"""``loomserve node`` on two machines, with Ray and without a platform."""

from __future__ import annotations

import contextlib

import psutil
import pytest

from tests.cluster.cluster import Cluster, RunningNode, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

END_S = 60.0
REAPED_S = 5.0


def called(node: RunningNode, part: str) -> list[psutil.Process]:
    """The node's processes whose command has this part."""
    found = []
    for process in node.machine.processes():
        with contextlib.suppress(psutil.Error):
            if part in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_raylet_that_ends_is_started_again_and_what_it_had_ends(two_nodes: Cluster) -> None:
    head, worker = two_nodes.nodes
    before = worker.machine.processes()
    (raylet,) = called(worker, "raylet/raylet")
    raylet.kill()
    worker.until_up()
    # The command itself, and what watches over its folder.
    own = (*called(worker, "loomserve node"), *called(worker, "loomserve.platform.run.leftovers"))
    kept = {process.pid for process in own}
    left = [one for one in before if one.pid not in kept and one.is_running()]
    until(
        lambda: not any(one.is_running() for one in left),
        END_S,
        lambda: str([one.cmdline() for one in left if one.is_running()]),
    )
    assert len(called(worker, "raylet/raylet")) == 1
    assert head.said.count(" is up at ") == 1, "the other node takes no notice"


# Of the cluster nothing is left either, so it comes last.
def test_nothing_is_left_of_a_node_that_is_stopped_or_whose_supervisor_is_killed(
    two_nodes: Cluster,
) -> None:
    head, worker = two_nodes.nodes
    worker.end()
    # What has ended stays a zombie until the node's init has reaped it.
    until(lambda: worker.machine.processes() == [], REAPED_S)
    assert "is stopped" in worker.said
    for supervisor in called(head, "loomserve node"):
        supervisor.kill()
    until(lambda: head.machine.processes() == [], END_S)
