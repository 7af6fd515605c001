"""How a command ends: by signals, while it waits, and with a message that says why."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.base.plain_reason import last_line

T = TypeVar("T")

_LOOK_S = 0.1
_TELL_S = 15.0


class Interrupted(Exception):  # noqa: N818 - nothing has failed
    """What was waited for is not wanted any more."""


class EndSignals:
    """SIGINT, SIGTERM and SIGHUP: the first asks for an end, the next one ends at once."""

    def __init__(self, at_once: Callable[[], None] = lambda: None) -> None:
        """``at_once`` is called before this process ends at once."""
        self.at_once = at_once
        self.asked = threading.Event()
        """Set once an end has been asked for."""

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            # Under nohup a command outlives its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked.is_set():
            self.at_once()
            os._exit(130)
        self.asked.set()


def telling(tell: Callable[[float], None]) -> Callable[[], None]:
    """A function to call often, which now and then gives ``tell`` the seconds that have passed."""
    began = told = time.monotonic()

    def look() -> None:
        nonlocal told
        if time.monotonic() - told > _TELL_S:
            told = time.monotonic()
            tell(told - began)

    return look


def finished(
    work: Callable[[], T],
    unless: Callable[[], object],
    tell: Callable[[float], None] = lambda _: None,
) -> T:
    """What ``work`` returns, which a thread of its own does: the calling one may be the main one,
    which handles signals, and of which none waits for a call of another library's to return.

    ``unless`` is asked, and ``tell`` told the seconds, meanwhile. Work that is no longer waited for
    goes on. Raises Interrupted if ``unless`` has said something.
    """
    if unless():
        raise Interrupted
    results: list[T] = []
    failures: list[BaseException] = []

    def working() -> None:
        try:
            results.append(work())
        except BaseException as error:
            failures.append(error)

    thread, look = threading.Thread(target=working, daemon=True), telling(tell)
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_S)
        if unless():
            raise Interrupted
        look()
    if failures:
        raise failures[0]
    return results[0]


_shown = False


def show_tracebacks() -> None:
    """Have :func:`report` say where in the code an error was raised, too."""
    global _shown
    _shown = True


def report(error: BaseException) -> None:
    if _shown:
        traceback.print_exception(error)
    print(f"loomserve: {in_a_paragraph(error)}", file=sys.stderr, flush=True)


def in_a_paragraph(error: BaseException, where: str = "loomserve --debug shows where") -> str:
    """What went wrong, without a traceback; ``where`` ends what nobody has foreseen."""
    said = str(error)
    if isinstance(error, LoomserveError):
        return said
    # Ray's have the traceback of another process before what went wrong.
    return f"{type(error).__name__}: {last_line(said)} ({where})"
