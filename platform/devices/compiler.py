"""The C++ compiler with which vLLM makes kernels for a machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterable

from loomserve.platform.base.errors import StartError
from loomserve.platform.config import Model


def check_compiler(models: Iterable[Model]) -> None:
    """
    Raises:
        StartError: a model is compiled, and there is no compiler.
    """
    compiles = any(
        # The platform compiles nothing of models that it places by itself.
        model.lending is None and not model.engine.get("enforce_eager", not model.is_placed)
        for model in models
    )
    if compiles and shutil.which("g++") is None and shutil.which("clang++") is None:
        raise StartError(
            "vLLM compiles its kernels for this machine and finds no C++ compiler: install g++, "
            "or set engine: {enforce_eager: true} for every model"
        )
