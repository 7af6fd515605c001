"""The step of ``make gpu-check`` that starts the platform, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_platform_answers_beside_vllms_own_server(tmp_path: Path) -> None:
    file = tmp_path / "platform.json"
    command = [sys.executable, "-m", "benchmarks.gpu.platform", str(file)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, check=True, env=environment, timeout=900)
    found = json.loads(file.read_text())
    paris = "The capital of France is Paris."
    assert found["answers"]["the real model's"] == found["comes and goes"]["its answer"] == paris
    assert found["answers"]["events of /v1/responses, and the last one"][1] == "response.completed"
    # In bfloat16 a prompt that has grown may round otherwise, but not before the kill.
    killed = found["a killed engine"]
    until_kill = killed["of characters, and until the kill"][-1]
    assert killed["characters before the first other one"] >= until_kill
    assert {*found["streams"]["8"]} == {"Loomserve", "vLLM"}
