"""Claims on devices."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device
from loomserve.platform.devices.claims import claim, engine_environment, place, try_claim
from tests.waiting import PATIENCE_S

CORES = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1, 2)))


def test_replicas_of_a_model_get_a_device_each_and_other_models_do_not_matter(
    tmp_path: Path,
) -> None:
    held = [try_claim("org/a", CORES, tmp_path) for _ in range(3)]
    assert [c.device.name for c in held if c] == ["core0", "core1"]
    other = try_claim("b", CORES, tmp_path)
    assert other is not None
    assert other.device.name == "core0"
    held[0].release()
    again = try_claim("org/a", CORES, tmp_path)
    assert again is not None
    assert again.device.name == "core0"


def test_a_killed_process_gives_its_device_back(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from loomserve.platform.config import Device;"
        "from loomserve.platform.devices.claims import try_claim;"
        "held = try_claim('a', [Device(name='core0', cores=(0,))], Path(sys.argv[1]));"
        "print('held', flush=True); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    assert try_claim("a", CORES[:1], tmp_path) is None
    process.kill()
    process.wait()
    assert try_claim("a", CORES[:1], tmp_path) is not None


async def _claim(folder: Path) -> None:
    await claim("a", CORES[:1], folder, timeout_s=0.3)


def test_a_claim_gives_up_in_time_and_says_why(tmp_path: Path) -> None:
    import asyncio

    held = try_claim("a", CORES[:1], tmp_path)
    assert held is not None
    began = time.monotonic()
    with pytest.raises(StartError, match="core0"):
        asyncio.run(_claim(tmp_path))
    assert time.monotonic() - began < PATIENCE_S


def test_the_environment_binds_an_engine_to_its_device() -> None:
    assert engine_environment(CORES[1])["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    gpu = Device(name="gpu3", kind="cuda", gpu=3)
    # CUDA would else count the fastest first, and not as nvidia-smi does.
    assert engine_environment(gpu) == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert [place(device) for device in (*CORES, gpu)] == ["core 0", "cores 1,2", "gpu 3"]
