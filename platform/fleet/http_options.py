"""Options of vLLM's engine that a model may bring over HTTP: those of ``http_options.toml`` alone.

Whoever has the admin token decides which models run, and whoever writes the configuration file
which code and which files. So what is taken over HTTP are sizes, data types, parsers and switches
that neither import code, open files or connections, read pickles, take templates or tensors from
clients, nor log prompts. A new option of vLLM is refused until somebody has looked at it.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import BadRequest

_READ = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TAKEN = frozenset(_READ["taken"])
TAKEN_WITHIN = {option: frozenset(fields) for option, fields in _READ["taken_within"].items()}
"""Of options that are classes of vLLM's, the fields that are taken."""

# vLLM's own names have no other characters; paths, URLs, modules' members and templates have.
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_given_over_http(options: Mapping[str, Any]) -> None:
    """Raises BadRequest if one of a model's engine options may stand in the configuration file
    only."""
    for option, value in options.items():
        if option not in TAKEN:
            raise _refused(option, "is not one of those that are taken over HTTP", option)
        if isinstance(value, dict) and option in TAKEN_WITHIN:
            for field in value.keys() - TAKEN_WITHIN[option]:
                raise _refused(f"{option}.{field}", "is not taken over HTTP")
        if not _is_plain(value):
            raise _refused(
                option, "is taken over HTTP only as a number, a switch or a name without / and ."
            )


def _refused(option: str, why: str, typed: str = "") -> BadRequest:
    near = difflib.get_close_matches(typed, TAKEN, n=1, cutoff=0.8)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return BadRequest(
        f"engine option {option!r} {why}{hint}: write the model into the configuration file and "
        "start again",
        param=f"engine.{option}",
    )


def _is_plain(value: object) -> bool:
    """Whether it holds numbers, switches and short names only."""
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, int | float)
