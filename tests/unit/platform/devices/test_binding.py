"""What binds engines to their devices."""

from __future__ import annotations

from loomserve.platform.config import Device
from loomserve.platform.devices.binding import engine_environment, place

CORES = (Device(name="core0", cores=(0,)), Device(name="core1", cores=(1, 2)))


def test_the_environment_binds_an_engine_to_its_device() -> None:
    assert engine_environment(CORES[1])["VLLM_CPU_OMP_THREADS_BIND"] == "1,2"
    gpu = Device(name="gpu3", kind="cuda", gpu=3)
    # CUDA would else count the fastest first, and not as nvidia-smi does.
    assert engine_environment(gpu) == {
        "CUDA_VISIBLE_DEVICES": "3",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    }
    assert [place(device) for device in (*CORES, gpu)] == ["core 0", "cores 1,2", "gpu 3"]
