"""The main module of an engine's process: ``python -m …child CONTROL_SOCKET [PARENT]``.

:mod:`loomserve.platform.engine.process.engine_process` starts it, if it is not forked.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING

from loomserve.platform.engine.core.control import be_engine
from loomserve.platform.engine.core.cores import bind_to_device
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.engine.process.engine_process import FORKED
from loomserve.platform.run.fate import end_with

if TYPE_CHECKING:
    from loomserve.platform.engine.core.served_core import ServedEngineCore

_logger = logging.getLogger(__name__)


def main(descriptor: int, how: str = "") -> None:
    """Make the engine that the replica asks for, and run it until its end. ``descriptor`` is this
    process's end of the channel to its replica; ``how`` is ``FORKED`` where this process was."""
    if how == FORKED:
        # Linux shares cores among sessions first: an engine has a share of its own.
        os.setsid()
        _begin_anew_without_cuda(descriptor)
    be_engine(descriptor, _made, _run)


def _begin_anew_without_cuda(descriptor: int) -> None:
    """Become a process that imports all by itself, if CUDA does not work in this one. So it is
    where its fork server had initialized CUDA's driver, which the fork server itself looks for."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    import torch

    try:
        torch.cuda.init()
    except RuntimeError as error:
        _logger.warning("no CUDA in a fork: the engine takes longer to start (%s)", error)
        os.set_inheritable(descriptor, True)
        # It still ends with the replica, by the connection that its fork server has given it.
        child = [sys.executable, "-m", __name__, str(descriptor)]
        os.execv(sys.executable, child)


def _made(start: EngineStart) -> ServedEngineCore:
    # Before what starts threads is imported.
    bind_to_device()
    # vLLM imports it to ask whether it is a worker of Ray's: half a second of a core.
    sys.modules["ray"] = None  # type: ignore[assignment]
    from vllm.transformers_utils.config import maybe_register_config_serialize_by_value
    from vllm.utils.system_utils import set_process_title

    from loomserve.platform.engine.core.served_core import ServedEngineCore
    from loomserve.platform.engine.executor import executor_class, one_process_executor
    from loomserve.platform.engine.grammar_tokenizer import read_with_first_grammar
    from loomserve.platform.engine.hooks import verify
    from loomserve.platform.engine.options.engine_config import engine_config, explained

    verify("vllm")
    # As vLLM's own EngineCore begins; workers of several processes get the model's configuration.
    set_process_title("EngineCore")
    maybe_register_config_serialize_by_value()
    read_with_first_grammar()
    choose = executor_class if start.own_process_workers else one_process_executor
    try:
        config = engine_config(start.options)
        return ServedEngineCore(config, choose(config), start)
    except Exception as error:
        raise explained(error) from None


def _run(core: ServedEngineCore) -> None:
    """Step until the replica stops it or an error does; clients learn of either."""
    try:
        core.run_busy_loop()
    except SystemExit:
        pass
    except Exception:
        _logger.exception("the engine has failed")
        raise
    finally:
        core._send_engine_dead()
        _shut_down(core)


def _shut_down(core: ServedEngineCore) -> None:
    """End the workers, and what the connector still has under way. vLLM's own shutdown collects
    garbage then, for a process that goes on. This one ends, and to visit all that it has imported
    takes a second of a core."""
    core.structured_output_manager.clear_backend()
    core.model_executor.shutdown()
    core.scheduler.shutdown()


if __name__ == "__main__":
    given, *parent = map(int, sys.argv[1:])
    if parent:
        end_with(parent[0])
    main(given)
