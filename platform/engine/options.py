"""Checks engine options against the installed vLLM before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from loomserve.platform.base.errors import ConfigError


def check(model: str, options: Iterable[str]) -> None:
    """Refuse names that vLLM does not know.

    Raises:
        ConfigError: names the option, and the nearest one that exists.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    known |= {field.name for field in dataclasses.fields(FrontendArgs)}
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model {model!r}: engine option {option!r} is unknown to vLLM{hint}")
