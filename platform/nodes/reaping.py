"""Orphans are handed to this process, and waited for.

A process that has ended and was not waited for keeps its id, so that others take it for alive: with
Ray's raylet as such a zombie, replicas of a dead node go on for minutes. In a container without an
init nobody else would wait for them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator

import psutil

from loomserve.platform.base.processes import children

_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of its descendants' orphans."""
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_orphans(own: Collection[int | None]) -> None:
    """Wait for all children that have ended, but for the ``own`` that this process waits for."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None or ended.si_pid in own:
            return
        os.waitpid(ended.si_pid, 0)


def has_ended(process: psutil.Process) -> bool:
    """Also if its parent has not noticed; not if it only cannot be looked at now."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):
        return False


def started(parent: int, names: Collection[str]) -> Iterator[psutil.Process]:
    """Children of these names, ended ones too, that have arguments: a name comes before those."""
    with contextlib.suppress(psutil.Error, OSError):
        for each in map(psutil.Process, children(parent)):
            if each.name() in names and (has_ended(each) or each.cmdline()):
                yield each
