"""Policies that installed packages bring: the examples, found by their entry points."""

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
from loomserve.platform.config.batching import BATCHING_POLICIES
from loomserve.platform.config.policies import PolicyRegistry
from loomserve.platform.config.router import ROUTING_POLICIES
from loomserve.platform.config.scheduling import QUEUE_ORDERS
from loomserve.routers.base import Candidates, Columns, Orders

EXAMPLES = Path(__file__).parents[2] / "examples"
CONFIGS = {
    "routing_policy": """
devices: [{name: core0, cores: [0]}]
models: [{name: m, source: simulated, devices: [core0], router: {policy: %s, options: %s}}]
""",
    "queue_order": """
devices: [{name: core0, cores: [0]}]
models:
- {name: m, source: simulated, devices: [core0], scheduling: {queue: %s, queue_options: %s}}
""",
    "batching_policy": """
devices: [{name: core0, cores: [0]}]
models: [{name: m, source: simulated, devices: [core0]}]
batch:
  offline_models: [{name: o, source: x, device: core0, batching: {policy: %s, options: %s}}]
""",
}
BEGIN = """
from loomserve.platform.config import parse
from loomserve.platform.config.reference import describe

def refusal(policy, options="{}"):
    try:
        parse(CONFIG % (policy, options))
    except Exception as error:
        return str(error)
"""
ROUTE = """
from loomserve.routers.in_flight import InFlight
from loomserve.routers.policy_choice import ReplicaChooser
from loomserve.routers.table import ReplicaTable
from loomserve.routers.policy_choice import RoutingTicket

router = parse(CONFIG % ("power_of_d", "{choices: 9}")).models[0].router
ledger = InFlight()
table = ReplicaTable(ledger, stale_after_s=1)
table.set_replicas("abc")
chooser = ReplicaChooser(
    "m", router.policy, table, load_limit=router.load_limit, options=router.options
)
tickets = [RoutingTicket(ledger) for _ in range(6)]
print(sorted(chooser.decide(ticket).replica_id for ticket in tickets), ledger.decisions())
"""
ORDER = """
from loomserve.platform.scheduling.options import SchedulerOptions, scheduler_options
from loomserve.platform.scheduling.simulator import Costs, Limits, Policies, SimulatedRequest
from tests.simulations import simulate

options = scheduler_options(parse(CONFIG % ("head_start", "{head_start_s: 2}")).models[0], None)
# As an engine's process reads them.
options = SchedulerOptions.model_validate_json(options.model_dump_json())
policies = Policies(options.queue, queue_options=options.queue_options)
requests = [
    SimulatedRequest(str(came_s), came_s, prompt, 1, 1)
    for came_s, prompt in ((0, 9), (1, 12), (1.5, 3), (4, 3))
]
times = simulate(
    requests,
    Limits(blocks=9, block_tokens=16, block_bytes=1, running=1, step_tokens=16),
    policies,
    Costs(lambda tokens: 1, lambda tokens: 1, step_s=lambda step: 10.0),
).times
print(sorted(times, key=lambda name: times[name].finished_s), options.queue_policy().as_they_came)
"""
FORM = """
from loomserve.routers.static_batching.base import BatchRequest, KvBudget, StaticBatch

rules = parse(CONFIG % ("bounded", "{longest_s: 5}")).offline_models[0].batching
policy = rules.batching_policy()
requests = [BatchRequest(name, 0.0, 4, 10) for name in "abcd"]
for _ in range(2):
    batches = policy.form(requests, KvBudget(1000, 1), now=0.0)
    print([len(batch.requests) for batch in batches], rules.order, end=" ")
    policy.ran(StaticBatch(tuple(requests[:1])), generated=10, seconds=2.0)
print()
"""
END = """
print(refusal(NAME, WRONG))
print(refusal("none"))
print([line for line in describe().splitlines() if FIELD in line])
"""
BROUGHT = {
    "routing_policy": ("power_of_d", "models[0].router.policy", "choices"),
    "queue_order": ("head_start", "models[0].scheduling.queue", "head_start_s"),
    "batching_policy": ("bounded", "batch.offline_models[0].batching.policy", "longest_s"),
}
OWN = {
    "routing_policy": "load_aware | round_robin | power_of_two | prefix_aware",
    "queue_order": "fair | fcfs | deadline | sjf",
    "batching_policy": "s3 | wma | slo_odbs | slo_dbs | odbs | fifo",
}
PROGRAMS = {
    "routing_policy": (
        ROUTE,
        "['a', 'a', 'b', 'b', 'c', 'c'] Counter({('m', 'power_of_d', 'power_of_d'): 6})",
    ),
    "queue_order": (ORDER, "['0', '1.5', '1', '4'] False"),
    "batching_policy": (FORM, "[4] oldest [2, 2] oldest "),
}
KINDS = pytest.mark.parametrize("kind", CONFIGS)


def installed(kind: str, folder: Path, **other: str) -> Path:
    """The example as pip leaves it in a folder of packages; ``other``: more entry points."""
    example = EXAMPLES / kind
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    ((group, entries),) = project["entry-points"].items()
    for file in example.glob("*.py"):
        (folder / file.name).write_bytes(file.read_bytes())
    info = folder / f"{project['name'].replace('-', '_')}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = [f"{name} = {at}" for name, at in (entries | other).items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]))
    return folder


def printed(kind: str, folder: Path, program: str) -> list[str]:
    """By a process of its own, which finds the packages of a folder."""
    path = os.pathsep.join([str(folder), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", f"CONFIG = {CONFIGS[kind]!r}{BEGIN}{program}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@KINDS
def test_a_process_finds_an_installed_policy_and_decides_by_it(kind: str, tmp_path: Path) -> None:
    (program, decided), (own, field, option) = PROGRAMS[kind], BROUGHT[kind]
    described = field.replace("[0]", "[]") + ":"
    names = f"NAME, WRONG, FIELD = {own!r}, '{{{option}: 0}}', {described!r}"
    first, wrong, unknown, line = printed(kind, installed(kind, tmp_path), program + names + END)
    assert first == decided
    options = field.removesuffix("policy") + "options" if "policy" in field else f"{field}_options"
    assert f": {options}.{option}: Input should be greater than" in wrong
    assert f": {field}: " in unknown
    assert f"'{OWN[kind].rpartition(' ')[2]}' or '{own}'" in unknown
    assert f"{OWN[kind]} | {own}" in line


@KINDS
def test_what_cannot_be_used_is_refused_and_what_there_is_is_not_replaced(
    kind: str, tmp_path: Path
) -> None:
    own, field = OWN[kind].partition(" ")[0], BROUGHT[kind][1]
    brought = {"lost": "nowhere:Policy", "broken": "broken:Policy", "odd": "json:loads"}
    folder = installed(kind, tmp_path, **brought, **{own: "nowhere:Policy"})
    (folder / "broken.py").write_text("1 +\n")
    lost, broken, odd, replaced = printed(
        kind,
        folder,
        "\n".join(f'print((refusal("{name}") or "").splitlines()[:1])' for name in (*brought, own)),
    )
    noun = kind.replace("_", " ")
    assert f"{field}: {noun} 'lost' cannot be imported: No module" in lost
    assert f"{field}: {noun} 'broken' cannot be imported: " in broken
    assert f"{noun} 'odd' is no {noun}: json:loads is to name a subclass" in odd
    assert replaced == "[]"


@pytest.mark.parametrize(
    ("kind", "registry"),
    [*zip(CONFIGS, (ROUTING_POLICIES, QUEUE_ORDERS, BATCHING_POLICIES), strict=True)],
)
def test_packages_are_not_looked_at_for_what_the_platform_has(
    kind: str, registry: PolicyRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(vars(registry), "_brought", raising=False)
    monkeypatch.setattr("loomserve.platform.config.policies.entry_points", None)
    parse(CONFIGS[kind] % (OWN[kind].partition(" ")[0], "{}"))


@pytest.mark.parametrize("policy", ROUTING_POLICIES.own)
def test_policies_of_the_platforms_own_have_no_options(policy: str) -> None:
    assert parse(CONFIGS["routing_policy"] % (policy, "{}")).models[0].router.policy == policy
    with pytest.raises(ConfigError, match=r"router.options.size: Extra inputs"):
        parse(CONFIGS["routing_policy"] % (policy, "{size: 3}"))


def test_the_example_prefers_short_queues_and_then_another_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES / "routing_policy")
    made = importlib.import_module("loomserve_power_of_d").PowerOfD
    rng = random.Random(0)
    model: Any = SimpleNamespace(replicas=SimpleNamespace(ids=("a", "b", "c")), rng=rng)
    policy = made(made.Options(choices=3), model)
    queues = np.array([1, 1, 2])
    columns = Columns(3)
    columns.queue_length[:] = queues
    columns.known[:] = True
    candidates = Candidates(columns, Orders(columns), range(3))
    policy.sent(SimpleNamespace(), SimpleNamespace(id="a"))
    assert {policy.pick(candidates, None).place for _ in range(20)} == {1}
