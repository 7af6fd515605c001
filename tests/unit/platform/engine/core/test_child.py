"""A forked engine's process on a GPU: one in which CUDA does not work becomes a fresh one."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
import vllm.platforms

from loomserve.platform.engine.core import child


class BecomesAnother(BaseException):
    """In the place of a program that replaces this one."""


def become(program: str, words: list[str]) -> None:
    raise BecomesAnother(program, *words)


@pytest.fixture(autouse=True)
def _on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    interrupted = signal.getsignal(signal.SIGINT)
    there = SimpleNamespace(is_cuda=lambda: True)
    monkeypatch.setattr(vllm.platforms, "current_platform", there, raising=False)
    monkeypatch.setattr(os, "execv", become)
    monkeypatch.setattr(os, "setsid", lambda: None)
    yield
    signal.signal(signal.SIGINT, interrupted)  # an engine ignores it


def test_a_fork_without_cuda_begins_anew_with_its_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(BecomesAnother) as became:
            child.main(theirs.fileno(), child.FORKED)
        assert os.get_inheritable(theirs.fileno())
        module, *words = became.value.args[3:]
        assert became.value.args[:3] == (sys.executable, sys.executable, "-m")
        assert module == child.__name__
        # Its replica's end is told it by the fork server's connection, which stays open.
        assert words == [str(theirs.fileno())]


def test_a_fork_with_cuda_waits_for_what_its_replica_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    monkeypatch.setattr(torch.cuda, "init", lambda: looked.append(1))
    ours, theirs = socket.socketpair()
    with ours:
        ours.shutdown(socket.SHUT_WR)  # as of a replica that has gone
        with pytest.raises((SystemExit, EOFError, OSError)):
            child.main(theirs.detach(), child.FORKED)
    assert looked == [1]
