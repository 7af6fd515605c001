"""Which options vLLM has, read from its installed sources: to import it takes ten seconds."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.engine.hooks import find_class


def check(model: str, options: Iterable[str]) -> None:
    """Refuse names that vLLM does not know.

    Raises:
        ConfigError: names the option, and the nearest one that exists.
    """
    known = _all_names()
    for option in options:
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"model {model!r}: engine option {option!r} is unknown to vLLM{hint}")


def is_option(name: str) -> bool:
    """Whether vLLM's server or its engine has an option of that name."""
    return name in _all_names()


def of_engine(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those that an engine takes, without those of its front end alone."""
    known = names_of_engine()
    return {name: value for name, value in options.items() if name in known}


def names_of_engine() -> frozenset[str]:
    """Options of an engine."""
    return _fields("vllm.engine.arg_utils", "AsyncEngineArgs")


def _all_names() -> frozenset[str]:
    return names_of_engine() | _fields("vllm.entrypoints.launchers.cli_args", "FrontendArgs")


@cache
def _fields(module: str, name: str) -> frozenset[str]:
    found = find_class(module, name)
    assert found is not None, f"the table of hooks has {module}:{name}"
    return frozenset(found.fields())
