"""How often a regular expression repeats what is in it, within each other times each other."""

from __future__ import annotations

import re

_COUNT = re.compile(r"\{(\d{0,9})(,?)(\d{0,9})\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


def repeats(pattern: str, most: int) -> int:
    """Copies of its characters and classes that its counted repeats (``{2,5}``) make.

    One over ``most`` is counted no further. What is no expression is counted as far as it goes.
    """
    # Of the expression, and of each group that is open: what is in it, and its last part.
    within, last = [0], [0]
    at, closed = 0, True
    while at < len(pattern):
        mark = pattern[at]
        step, part = 1, 0
        if mark == "(":
            within.append(0)
            last.append(0)
        elif mark == ")" and len(within) > 1:
            part = within.pop()
            last.pop()
            last[-1] = part
            within[-1] += part
        elif mark == "{" and (count := _COUNT.match(pattern, at)):
            times = max(int(count[3] or 0), int(count[1] or 0))
            # What the part has of its own is counted already.
            within[-1] += max(last[-1] * (times - 1), 0) if last[-1] else times
            last[-1] = max(last[-1], 1) * times
            step = len(count[0])
        elif mark == "\\":
            step, last[-1] = 2, 0
        elif mark == "[" and closed:
            found = _CLASS.match(pattern, at)
            closed = found is not None
            step, last[-1] = len(found[0]) if found else 1, 0
        elif mark not in "*+?":
            last[-1] = 0
        at += step
        if within[-1] > most:
            return most + 1
    return sum(within)
