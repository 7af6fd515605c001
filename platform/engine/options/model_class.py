"""vLLM's class of a model, looked at in the process that is to know it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm import ModelRegistry
from vllm.platforms import current_platform

from loomserve.platform.base.errors import ConfigError

_logger = logging.getLogger(__name__)


def look_at_class(options: Mapping[str, Any]) -> None:
    """Import the class of the model of a folder, and have vLLM know what it can.

    To learn that, vLLM starts a Python that imports vLLM, for ten seconds of a core and more, lest
    CUDA be initialized here; and of what fails there it says only that it failed.

    Args:
        options: Of ``AsyncEngineArgs``.

    Raises:
        ConfigError: the class needs a package that is not installed; names it.
    """
    if not current_platform.is_cpu():
        return
    try:
        config = json.loads((Path(options["model"]) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # a hub id, or for vLLM to say
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:
            _look(name)


def _look(name: str) -> None:
    try:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"vLLM's {name} needs the Python package {missing.name}, which is not installed: "
            "install it, or serve a model of another family"
        ) from None
    except Exception:  # whatever a module raises; vLLM looks once more, and refuses the model
        _logger.warning("the class of %s cannot be imported", name, exc_info=True)
