"""A command waits for nothing that nobody wants any more, and says why it ends in one paragraph."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.run import ending
from loomserve.platform.run.ending import EndSignals, Interrupted, finished, report


def test_what_is_finished_gives_its_result_or_its_error() -> None:
    assert finished(lambda: 7, lambda: False) == 7
    with pytest.raises(StartError, match="no room"):
        finished(lambda: raised(StartError("no room")), lambda: False)


def raised(error: Exception) -> None:
    raise error


def test_work_that_hangs_is_waited_for_until_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ending, "_TELL_S", 0.2)
    told: list[float] = []
    with pytest.raises(Interrupted):
        finished(threading.Event().wait, lambda: len(told) > 1, told.append)
    assert told[0] >= 0.2


def test_work_that_nobody_wants_does_not_begin() -> None:
    with pytest.raises(Interrupted):
        finished(lambda: pytest.fail("it began"), lambda: True)


# Waits as the command does, with work that never ends.
WAITING = """
import signal, threading
from loomserve.platform.run.ending import EndSignals, Interrupted, finished
# As in a terminal, though the tests themselves may run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
ends = EndSignals(lambda: print("at once", flush=True))
ends.catch()
try:
    finished(lambda: print("waits", flush=True) or threading.Event().wait(), ends.asked.is_set)
except Interrupted:
    print("asked", flush=True)
threading.Event().wait()
"""


@pytest.fixture
def waiting() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", WAITING], stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_asks_for_an_end_and_the_second_is_one(
    waiting: subprocess.Popen[str], first: signal.Signals, second: signal.Signals
) -> None:
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "waits\n"
    waiting.send_signal(first)
    assert waiting.stdout.readline() == "asked\n"
    waiting.send_signal(second)
    assert waiting.stdout.readline() == "at once\n"
    assert waiting.wait(60) == 130


def test_under_nohup_a_terminal_may_end(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    try:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        ends = EndSignals()
        ends.catch()
        os.kill(os.getpid(), signal.SIGHUP)
        assert not ends.asked.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        assert ends.asked.wait(60)
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def test_an_error_is_a_paragraph_and_where_it_was_raised_is_shown_when_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = RuntimeError("ray::task()\n  File x\nValueError: no such thing\n")
    report(StartError("no room: make some"))
    report(remote)
    assert capsys.readouterr().err == (
        "loomserve: no room: make some\n"
        "loomserve: RuntimeError: ValueError: no such thing (loomserve --debug shows where)\n"
    )
    monkeypatch.setattr(ending, "_shown", True)
    with pytest.raises(StartError) as raising:
        raised(StartError("no room"))
    report(raising.value)
    assert "in raised" in capsys.readouterr().err
