"""Why something failed, from the words of Python programs, for a person."""

from __future__ import annotations

import re

_MOST = 600
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CLASS = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*(?:Error|Exception|Ended|Interrupt))\b")
_LEADING = re.compile(rf"^\s*(?:{_CLASS.pattern}(?:\([^)]*\))?\s*:\s*)+")
_PATHS = re.compile(r"\b(?:[A-Za-z_]\w*\.){2,}([A-Z]\w*)\b")
_PYDANTIC = re.compile(r"\s*\[type=\w+, input_value=.*?\](?=\s|$)|\s*For further information .*")


def plain_reason(words: str) -> str:
    """The words in one paragraph, without classes of exceptions before them and modules in them."""
    text = " ".join(_COLOURS.sub("", words).split())
    text = _PYDANTIC.sub("", text)
    text = _LEADING.sub("", text).removeprefix("Value error, ") or text
    text = _PATHS.sub(r"\1", text)
    return text if len(text) <= _MOST else f"{text[: _MOST - 3]}..."


def first_line(error: Exception) -> str:
    """The first line of an error's message; its class if it has none."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__


def last_line(words: str) -> str:
    """The last line that says something; empty: none does."""
    return next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")


def reason_of_traceback(words: str) -> str:
    """The same of a text that may hold whole tracebacks: of its last exception."""
    lines = _COLOURS.sub("", words).splitlines()
    starts = [at for at, line in enumerate(lines) if _LEADING.match(line)]
    if not starts:
        return plain_reason(last_line(words))
    last = [lines[starts[-1]]]
    for line in lines[starts[-1] + 1 :]:
        if not line.strip() or line.startswith(("Traceback", "  File", "During handling")):
            break
        last.append(line)
    return plain_reason("\n".join(last))
