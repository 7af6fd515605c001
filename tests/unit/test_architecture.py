"""The documents agree with the tree, and the layers with their rules."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("platform", "deployments", "routers", "kvstore", "benchmarks")
PURE = ("routers/base.py", "routers/load_aware.py", "routers/round_robin.py",
        "routers/power_of_two.py", "routers/decision.py", "platform/access/limits.py",
        "platform/memory.py", "deployments/fleet.py", "deployments/loan_orders.py",
        "deployments/base.py",
        "deployments/kv_request.py", "kvstore/index.py", "kvstore/radix.py", "kvstore/eviction.py",
        "kvstore/recovery.py", "platform/scheduling/admission.py",
        "platform/scheduling/preemption.py", "platform/scheduling/queue.py",
        "platform/scheduling/deadline.py", "platform/scheduling/simulator.py",
        "platform/engine/turnaround.py", "deployments/scheduler_fields.py",
        "platform/costs/step_time.py", "platform/costs/transfer_time.py",
        "platform/costs/correction.py", "platform/lending/boundary.py",
        "platform/lending/budget.py", "platform/lending/layout.py", "platform/lending/limits.py",
        "platform/lending/placement.py", "platform/lending/side_costs.py",
        "platform/lending/splitting.py", "platform/batch/admission.py",
        "platform/batch/fairness.py", "platform/batch/lengths.py", "platform/batch/lines.py",
        "platform/batch/progress.py", "platform/batch/snapshot.py",
        "platform/batch/status.py", "platform/batch/store.py", "platform/scheduling/background.py",
        "deployments/client_request.py", "deployments/line_endpoint.py",
        "platform/access/key_models.py", "platform/placement/beam.py",
        "platform/placement/bounds.py", "platform/placement/exact.py",
        "platform/placement/explanation.py", "platform/placement/graph.py",
        "platform/placement/helr.py", "platform/placement/kinds.py",
        "platform/placement/planner.py",
        "routers/batching/base.py", "routers/batching/fifo.py", "routers/batching/next_batch.py",
        "routers/batching/queue.py", "routers/batching/recovery.py", "routers/batching/s3.py",
        "routers/batching/slo_odbs.py", "routers/batching/wma.py",
        "platform/rebalancing/actions.py", "platform/rebalancing/candidates.py",
        "platform/rebalancing/correction.py", "platform/rebalancing/effects.py",
        "platform/rebalancing/forecast.py", "platform/rebalancing/heat.py",
        "platform/rebalancing/limits.py",
        "platform/rebalancing/options.py", "platform/rebalancing/planner.py",
        "platform/rebalancing/plans.py",
        "platform/rebalancing/controller.py", "platform/rebalancing/execution.py",
        "platform/rebalancing/history.py", "platform/rebalancing/manual.py",
        "platform/rebalancing/mover.py", "platform/rebalancing/rates.py",
        "platform/rebalancing/reports.py", "platform/rebalancing/store.py",
        "platform/rebalancing/snapshot.py",
        "platform/costs/engine_work.py", "deployments/measured_snapshot.py")  # fmt: skip


def modules() -> list[Path]:
    return [p for folder in CODE for p in (ROOT / folder).rglob("*.py")]


def imported(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return names | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for name in imported(path))


def test_every_folder_and_file_has_one_sentence_and_no_sentence_lacks_its_file() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    listed = re.findall(r"^\| `([^`]+)` \| .+ \|$", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    files = {str(p.relative_to(ROOT)) for p in modules() if p.name != "__init__.py"}
    folders = {f"{p.parent.relative_to(ROOT)}/" for p in modules()}
    there = files | folders | {"dashboards/", "examples/", "scripts/", "tests/", "docs/"}
    assert set(listed) == there


def test_platform_has_no_init_which_would_shadow_the_standard_library() -> None:
    assert not (ROOT / "platform/__init__.py").exists()


@pytest.mark.parametrize("path", PURE)
def test_policies_and_plain_state_import_neither_ray_nor_vllm_nor_torch(path: str) -> None:
    assert not any(uses(ROOT / path, package) for package in ("ray", "vllm", "torch"))
    assert "time" not in imported(ROOT / path)


def test_vllm_is_touched_only_behind_its_door() -> None:
    doors = {"platform/engine", "deployments/engine_server.py", "kvstore/connector.py"}
    doors |= {"benchmarks/"}  # they measure against vLLM itself
    for path in modules():
        name = str(path.relative_to(ROOT))
        if uses(path, "vllm"):
            assert any(name.startswith(door) for door in doors), name


def test_ray_serve_llm_is_touched_only_by_deployments_and_routers() -> None:
    for path in modules():
        if any(name.startswith(("ray.serve.llm", "ray.llm")) for name in imported(path)):
            assert path.relative_to(ROOT).parts[0] in {"deployments", "routers"}, path


def test_every_package_is_listed_for_the_build() -> None:
    listed = re.findall(r'"loomserve\.([\w.]+)" = ', (ROOT / "pyproject.toml").read_text())
    folders = {
        ".".join(p.parent.relative_to(ROOT).parts)
        for p in modules()
        if p.relative_to(ROOT).parts[0] != "benchmarks"
    }
    assert set(listed) == folders
