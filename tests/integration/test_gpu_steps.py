"""All steps on a GPU without one, and what is packed of them for a machine that has one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.gpu import bundle
from benchmarks.gpu.__main__ import STEPS
from benchmarks.gpu.runner import run

ROOT = Path(__file__).parents[2]
NO_TRITON = "Triton, which interprets and compiles the kernels, is not installed"
APART = ("probe", "engines", "platform")
"""The first is tested by itself; engines lend by interpreted kernels in a test beside this one, and
the platform is started in an end-to-end test."""


def test_without_a_gpu_all_steps_do_what_they_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(ROOT)
    # A busy machine must not fail it.
    patient = [replace(step, seconds=500) for step in STEPS if step.name not in APART]
    outcomes = run(patient, tmp_path, budget_s=5000)
    assert {outcome.name: outcome.state for outcome in outcomes} == dict.fromkeys(
        (step.name for step in patient), "done"
    ), outcomes
    found = {
        step.name: json.loads((tmp_path / f"{step.name}.json").read_text())["found"]
        for step in patient
    }
    assert found["compile"]["form"] == "compiled, not run"
    assert all(found[name]["form"] == "interpreted, not timed" for name in ("kernels", "lend"))


def test_a_bundle_has_sources_kernels_and_shapes(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason=NO_TRITON)
    for part in "km":
        (file,) = bundle.pack(part, bundle.PARTS[part](tmp_path), tmp_path / "gpu")
        assert file.stat().st_size < 2**21
    with tarfile.open(tmp_path / "gpu/k/k.tar.xz") as archive:
        names = set(archive.getnames())
        archive.extractall(tmp_path / "there", filter="data")
    assert {"loomserve/platform/lending/cuda/serving.py", "kernels/attend_rows.cubin"} <= names
    # It stands alone: what is packed finds all that it imports.
    there = {"PYTHONPATH": str(tmp_path / "there"), "PATH": os.environ["PATH"]}
    for step in ("kernels", "processes"):
        ran = subprocess.run(
            [sys.executable, "-P", "-m", f"benchmarks.gpu.{step}", str(tmp_path / "found.json")],
            cwd=tmp_path / "there",
            env=there,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert "greatest error" in (tmp_path / "found.json").read_text()
