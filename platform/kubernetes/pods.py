"""What a pod of a Ray cluster has that the platform did not start: its environment and folders.

KubeRay starts Ray, so what ``loomserve node`` does ahead of that has to stand in the pod.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from loomserve.platform.base.errors import StartError
from loomserve.platform.kubernetes.values import digest
from loomserve.platform.run.folder import RUN_VARIABLE, RunFolder
from loomserve.platform.run.ray_environment import kept_node_environment
from loomserve.platform.run.shared_memory import SHARED_MEMORY

INTERNAL_TOKEN_VARIABLE = "LOOMSERVE_INTERNAL_TOKEN"
"""Of all pods of a cluster: what its processes ask each other for."""
RUN_FOLDER = Path("/tmp/loomserve")
"""A pod is one run, in a folder of its own."""

_LEAST_CHARACTERS = 32
# vLLM's queues, task rings, Python's locks, Ray's store of objects.
_LEFT_BY_A_RUN = re.compile(r"psm_\w+|loomserve-ring-.+|sem\..+|plasma.*")
_POLL_S = 1.0


def pod_environment() -> dict[str, str]:
    """What all processes of a pod read, but for its names, times and secrets."""
    run = RunFolder(RUN_FOLDER)
    return kept_node_environment() | {
        RUN_VARIABLE: str(run.path),
        "TMPDIR": str(run.temporary),
        "SPT_NOENV": "1",
    }


def prepare_pod(memory: Path = SHARED_MEMORY) -> None:
    """Make the folders of this pod's run, and remove what a killed container has left there.
    Nothing of the platform runs yet. The arena of the KV store stays, which the next store takes.
    ``memory``: the folder of shared memory, which is the pod's alone. Raises StartError if this is
    no pod of the chart's."""
    path = os.environ.get(RUN_VARIABLE)
    if path is None:
        raise StartError(f"{RUN_VARIABLE} is not set: this command is for the pods of the chart")
    run = RunFolder(Path(path))
    run.path.mkdir(parents=True, exist_ok=True, mode=0o700)
    run.clear()
    for folder in (run.sockets, run.temporary):
        folder.mkdir(mode=0o700)
    for left in memory.iterdir():
        if _LEFT_BY_A_RUN.fullmatch(left.name):
            with contextlib.suppress(OSError):  # it is another user's
                shutil.rmtree(left) if left.is_dir() else left.unlink()


def internal_token() -> str:
    """The token of this cluster's processes; StartError: there is none, or it is too short."""
    token = os.environ.get(INTERNAL_TOKEN_VARIABLE, "")
    if len(token) < _LEAST_CHARACTERS:
        raise StartError(
            f"{INTERNAL_TOKEN_VARIABLE} must have {_LEAST_CHARACTERS} characters at least, and be "
            "the same in all pods of a cluster: the chart takes it from a Secret"
        )
    return token


def read_config(path: Path, expected: str, timeout_s: float) -> str:
    """The text of the configuration that has this digest; StartError: the file stays another one.
    Kubernetes takes a minute or so to bring a changed Secret to its pods."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
        if digest(text) == expected:
            return text
        if time.monotonic() > deadline:
            raise StartError(
                f"{path} is not the configuration that the RayService was made of, and has not "
                f"become it within {timeout_s:.0f} s: was its Secret changed by another hand?"
            )
        time.sleep(_POLL_S)
