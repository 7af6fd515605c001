"""What counts against an engine's process that is silent, and when it has to be ended."""

from __future__ import annotations

WEDGED_S = 120.0
"""Counted seconds after which an engine that takes no turn between steps is ended."""

UNSENT_TURNS = 30
"""Turns between steps after which an engine is ended that has sent nothing meanwhile."""

# Of a second on cores, and of one in which a core or a disk is waited for.
_COMPUTING, _WAITING = 0.1, 0.01
# What an engine that does nothing needs to hear and be heard: with less it does not compute.
_AT_REST = 0.05


def counted_against(passed_s: float, computed_s: float, *, wants: bool) -> float:
    """Seconds of those passed that count against an engine that does not speak, or not step. All of
    them if it sleeps. One that computes is slow, and one that ``wants`` a core or a disk is on a
    busy machine; but neither may last for ever. ``computed_s`` it has had on all cores."""
    if not wants and computed_s < _AT_REST * passed_s:
        return passed_s
    on_cores_s = min(max(computed_s, 0.0), passed_s)
    return _COMPUTING * on_cores_s + _WAITING * (passed_s - on_cores_s)


def wedged(
    lasted_s: float, counted_s: float, limit_s: float = WEDGED_S, *, stopped: bool = False
) -> str | None:
    """Why an engine that has taken no turn for ``lasted_s`` has to be ended; None: it need not.
    ``counted_s`` of them count (:func:`counted_against`), of which ``limit_s`` are allowed."""
    if counted_s <= limit_s:
        return None
    if stopped:
        did = "is stopped"
    elif counted_s > lasted_s / 2:
        did = "slept"
    else:
        did = "computed, or waited for a core,"
    return f"its process {did} and came to the end of no step for {lasted_s:.0f} s"


def sends_nothing(turns: int) -> str | None:
    """Why an engine has to be ended that took so many turns in a row and sent nothing meanwhile.
    None: it need not. They are counted, not timed: on a busy machine its loop waits for a core as
    its thread that sends outputs does. ``turns`` begin anew when that has sent something."""
    if turns < UNSENT_TURNS:
        return None
    return f"its steps went on, and its thread that sends outputs sent none in {turns} turns"
