"""An engine's process as its replica sees it: forked by the node's fork server, or spawned."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Literal

from loomserve.platform.engine.process.forking import ForkedProcess
from loomserve.platform.engine.process.forking import fork as fork_child

_logger = logging.getLogger(__name__)

_CHILD = "loomserve.platform.engine.core.child"
SIMULATED_CHILD = "loomserve.platform.simulated.child"
FORKED = "forked"
_ENGINE_MODULES = (
    _CHILD,
    "loomserve.platform.engine.core.served_core",
    "loomserve.platform.engine.grammar_tokenizer",
    "loomserve.platform.lending.engine.scheduler",
    "loomserve.kvstore.engine.connector",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.model_executor.models.llama",
)
# A GPU's engine that finds the CPU's worker imported has no streams: vLLM replaces torch's.
_WORKER_MODULES = {
    "cpu": (
        "loomserve.platform.lending.engine.cpu_worker",
        "loomserve.platform.engine.process.registered_kernels",
    ),
    "cuda": ("loomserve.platform.engine.resumption.gpu_worker",),
}


def engine_modules(kind: Literal["cpu", "cuda"]) -> tuple[str, ...]:
    """Modules that a fork server imports for engines on devices of one kind. vLLM is installed for
    that kind; whatever else an engine needs, it imports itself."""
    return *_ENGINE_MODULES, *_WORKER_MODULES[kind]


EngineProcess = ForkedProcess | subprocess.Popen[bytes]


async def start_process(
    environment: Mapping[str, str], timeout_s: float, *, fork: bool = True, simulated: bool = False
) -> tuple[socket.socket, EngineProcess]:
    """Start a process that waits to be told what engine to make; returns the channel to it, too.

    It is forked, if it may be and this run has a fork server, else spawned. It ends with this
    process; a spawned one ends with this thread. A simulated engine imports so little that it is
    always spawned. ``environment`` is added to this process's own; a fork server has ``timeout_s``
    to import what it has to.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        whole = {**os.environ, **environment}
        forked = None
        if fork and not simulated:
            forked = await asyncio.to_thread(_forked, theirs.fileno(), whole, timeout_s)
        return ours, forked or _spawned(
            SIMULATED_CHILD if simulated else _CHILD, theirs.fileno(), whole
        )


def _forked(control: int, environment: Mapping[str, str], timeout_s: float) -> ForkedProcess | None:
    try:
        return fork_child(_CHILD, (FORKED,), environment, control, timeout_s)
    except (OSError, ValueError) as error:
        _logger.warning("no fork server: the engine takes longer to start (%r)", error)
        return None


def _spawned(child: str, control: int, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", child, str(control), str(os.getpid())],
        env=environment,
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
    )
