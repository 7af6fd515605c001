"""A routing policy that an installed package brings: the example, found by its entry point."""

from __future__ import annotations

import importlib
import os
import random
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import parse
from loomserve.platform.config.router import POLICIES
from loomserve.routers.base import Candidates

EXAMPLE = Path(__file__).parents[3] / "examples" / "routing_policy"
CONFIG = """
devices: [{name: core0, cores: [0]}]
models: [{name: m, source: simulated, devices: [core0], router: {policy: %s, options: %s}}]
"""
BEGIN = f"""
from loomserve.platform.config import parse
from loomserve.platform.config.reference import describe

def refusal(policy, options="{{}}"):
    try:
        parse({CONFIG!r} % (policy, options))
    except Exception as error:
        return str(error)
"""
ROUTE = """
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy_choice import ReplicaChooser
from loomserve.routers.table import ReplicaTable
from loomserve.routers.ticket import RoutingTicket

router = parse(CONFIG % ("power_of_d", "{choices: 9}")).models[0].router
ledger = InFlight()
table = ReplicaTable(ledger, stale_after_s=1)
table.set_replicas("abc")
chooser = ReplicaChooser(
    "m", router.policy, table, load_limit=router.load_limit, options=router.options
)
tickets = [RoutingTicket(ledger) for _ in range(6)]
print(sorted(chooser.decide(ticket).replica_id for ticket in tickets), ledger.decisions())
print(refusal("power_of_d", "{choices: 0}"))
print(refusal("none"))
print([line for line in describe().splitlines() if ".router.policy:" in line])
"""


def installed(folder: Path, **other: str) -> Path:
    """The example as pip leaves it in a folder of packages; ``other``: more entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    ((group, entries),) = project["entry-points"].items()
    for file in EXAMPLE.glob("*.py"):
        (folder / file.name).write_bytes(file.read_bytes())
    info = folder / "loomserve_power_of_d-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {at}" for name, at in (entries | other).items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return folder


def printed(folder: Path, program: str) -> list[str]:
    """By a process of its own, which finds the packages of a folder."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", f"CONFIG = {CONFIG!r}{BEGIN}{program}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_process_finds_an_installed_policy_and_routes_by_it(tmp_path: Path) -> None:
    decisions, options, name, described = printed(installed(tmp_path), ROUTE)
    assert decisions == (
        "['a', 'a', 'b', 'b', 'c', 'c'] Counter({('m', 'power_of_d', 'power_of_d'): 6})"
    )
    assert "models[0].router.options.choices: Input should be greater than or equal" in options
    assert "models[0].router.policy: " in name
    assert "'prefix_aware' or 'power_of_d'" in name
    assert "load_aware | round_robin | power_of_two | prefix_aware | power_of_d" in described


def test_what_cannot_be_used_is_refused_and_what_there_is_is_not_replaced(
    tmp_path: Path,
) -> None:
    brought = {"lost": "nowhere:Policy", "broken": "broken:Policy", "odd": "json:loads"}
    folder = installed(tmp_path, **brought, load_aware="nowhere:Policy")
    (folder / "broken.py").write_text("1 +\n")
    names = (*brought, "load_aware")
    lost, broken, odd, own = printed(
        folder, "\n".join(f'print((refusal("{name}") or "").splitlines()[:1])' for name in names)
    )
    assert "models[0].router.policy: routing policy 'lost' cannot be imported: No module" in lost
    assert "models[0].router.policy: routing policy 'broken' cannot be imported: " in broken
    assert "routing policy 'odd' is no routing policy: json:loads is to name a subclass" in odd
    assert own == "[]"


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_the_platforms_own_have_no_options(policy: str) -> None:
    assert parse(CONFIG % (policy, "{}")).models[0].router.policy == policy
    with pytest.raises(ConfigError, match=r"router.options.size: Extra inputs"):
        parse(CONFIG % (policy, "{size: 3}"))


def test_the_example_prefers_short_queues_and_then_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLE)
    made = importlib.import_module("loomserve_power_of_d").PowerOfD
    rng = random.Random(0)
    model: Any = SimpleNamespace(replicas=SimpleNamespace(ids=("a", "b", "c")), rng=rng)
    policy = made(made.Options(choices=3), model)
    queues = np.array([1, 1, 2])
    zeros = np.zeros(3)
    columns = Candidates(zeros, queues, zeros == 0, queues, np.arange(3))
    policy.sent(SimpleNamespace(), SimpleNamespace(id="a"))
    assert {policy.pick(columns, None).place for _ in range(20)} == {1}
