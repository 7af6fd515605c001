"""torch's groups of one process: no ports, and the same answers as Gloo's. In a process each, for
torch has one default group."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.waiting import PATIENCE_S

GROUPS = """
import json, sys, psutil, torch
import torch.distributed as dist
from loomserve.platform.engine.process.lone_groups import groups_without_ports

makers = dist.init_process_group, dist.new_group
with groups_without_ports(int(sys.argv[1])):
    dist.init_process_group(backend="gloo", store=dist.HashStore(), world_size=1, rank=0)
    groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
assert makers == (dist.init_process_group, dist.new_group)

group, value = groups[0], torch.arange(3.0)
gathered, summed, objects, said = [torch.zeros(3)], value.clone(), [None], [{"a": 1}]
dist.all_gather(gathered, value, group=group)
dist.all_reduce(summed, group=group)
dist.all_gather_object(objects, said, group=group)
dist.broadcast_object_list(said, src=0, group=group)
dist.barrier(group=group)
connections = psutil.Process().net_connections("inet")
print(json.dumps({
    "listens": sum(each.status == psutil.CONN_LISTEN for each in connections),
    "answers": [gathered[0].tolist(), summed.tolist(), objects, said],
    "size": dist.get_world_size(group),
}))
"""


def made(world_size: int) -> dict[str, object]:
    """``world_size`` as the groups are told; they have one process, or torch would wait."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", GROUPS, str(world_size)],
        capture_output=True, text=True, check=True, timeout=PATIENCE_S,
    )  # fmt: skip
    said = json.loads(run.stdout)
    assert isinstance(said, dict)
    return said


@pytest.mark.parametrize(("world_size", "ports"), [(1, 0), (2, 4)])
def test_groups_of_one_process_open_no_ports_and_answer_as_gloo_does(
    world_size: int, ports: int
) -> None:
    numbers = [0.0, 1.0, 2.0]
    assert made(world_size) == {
        "listens": ports,
        "answers": [numbers, numbers, [[{"a": 1}]], [{"a": 1}]],
        "size": 1,
    }
