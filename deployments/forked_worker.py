"""A Ray worker that was forked by its node's fork server, and so has imported vLLM and torch.

A gateway takes 9 s of a core to import vLLM, and an offline model's process 5 s to import torch and
transformers. A fork has them at once, and shares their memory with the engines of its node.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
from typing import Literal

from setproctitle import setproctitle

from loomserve.platform.engine.process.engine_process import engine_modules

_OTHER_MODULES = (
    __name__,
    "fastapi",
    "loomserve.platform.front_end.engine.serving",
    "loomserve.platform.batch.offline.executor",
    "loomserve.platform.batch.offline.lines",
)


def preloaded(kind: Literal["cpu", "cuda"]) -> tuple[str, ...]:
    """What a node's fork server imports; ``kind`` is of the devices that its vLLM computes on."""
    return *engine_modules(kind), *_OTHER_MODULES


_STDIN = 0


def main(stdin: int, title: str, folder: str, script: str, *arguments: str) -> None:
    """Be a worker, in a process that was just forked.

    Args:
        stdin: descriptor of its standard input.
        script: path of Ray's script of workers, with its ``arguments``.
    """
    os.dup2(stdin, _STDIN)
    os.close(stdin)
    os.chdir(folder)
    # Ray ends a worker's whole group with it, and Linux shares cores among sessions first.
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Ray's own way fails in a process whose environment is another than at its start.
    setproctitle(title)
    _undo_vllms_logging()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script, run_name="__main__")


def _undo_vllms_logging() -> None:
    """Have what vLLM says go the way of a gateway's logs, as ``VLLM_CONFIGURE_LOGGING=0`` does."""
    logger = logging.getLogger("vllm")
    for handler in [*logger.handlers]:
        logger.removeHandler(handler)
    logger.propagate = True
    logger.setLevel(logging.NOTSET)
