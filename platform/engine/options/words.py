"""What vLLM says of its command line, in words of the configuration."""

from __future__ import annotations

import re

from loomserve.platform.engine.options.names import is_option

_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z0-9]*(?:[-_][a-z0-9]+)*)((?:\.\w+)*)(=(?=\S))?")


def in_fields(text: str) -> str:
    """The text with ``--some-flag`` of vLLM's server as ``models[].engine.some_flag``.

    Environment variables (``VLLM_...``) and what is no option of vLLM's stay as they are.
    """
    return _FLAG.sub(_field, text) if "--" in text else text


def _field(found: re.Match[str]) -> str:
    name, inner, equals = found[1].replace("-", "_"), found[2], ": " if found[3] else ""
    if is_option(name):
        return f"models[].engine.{name}{inner}{equals}"
    without = name.removeprefix("no_")
    if without != name and is_option(without):
        return f"models[].engine.{without}: false"
    return found[0]
