"""The words by which the ends of a loan meet, alike for the ring's and the kernels' data.

Replicas and kernels read them, too, so this imports nothing.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

LINE_WORDS = 16
"""int64 words of a line, 128 bytes: some machines have such cache lines, and others fetch those of
64 bytes in pairs. What one end writes shares none with what the other writes."""


class Closed(enum.IntEnum):
    """Why a ring is closed; a word that is none of these counts as FAILED."""

    OPEN = 0
    DRAINED = 1
    """The loan has ended in good order."""
    REVOKED = 2
    """The lender took its memory back."""
    TIMED_OUT = 3
    """The borrower waited too long for a result."""
    DIED = 4
    """The process at the other end is gone."""
    REFUSED = 5
    """The borrower asked for what no borrower may."""
    FAILED = 6
    """The lender's attention raised an error; its log has it."""

    @classmethod
    def _missing_(cls, value: object) -> Closed:
        return cls.FAILED


class ControlLine(enum.IntEnum):
    """The control lines; in brackets stands what their words hold after the first."""

    GRANTED = 0
    WANTED = 1
    VACATED = 2
    CLOSED = 3
    BORROWER = 4
    """pid [time of the last beat, ns]"""
    LENDER = 5
    """pid [time of the last beat, ns]"""
    STEP = 6
    """number of the step [requests, tokens, what is to be done (:class:`RingTask`)]"""
    POSTED = 7
    """number of the last task posted [layer, time of the post, ns]"""
    DONE = 8
    """number of the last task done"""
    SLEEPING = 9
    """1 while a post must wake the lender"""
    BORROWER_STATS = 10
    LENDER_STATS = 11


class RingTask(enum.IntEnum):
    """What the tasks of a step do. In a step that copies, ``requests`` counts blocks."""

    ATTEND = 0
    WRITE = 1
    """Copy blocks into the lender's memory."""
    READ = 2
    """Copy blocks out of it."""


class RingStats(NamedTuple):
    """Counts of a ring's tasks but for copies, and their times in ns. ``tasks`` to ``wait_max_ns``
    are the borrower's: waits last until a result was copied out. The others are the lender's:
    ``pickup_ns`` passed between post and begin of service."""

    tasks: int
    post_ns: int
    wait_ns: int
    wait_max_ns: int
    polled: int
    idled: int
    service_ns: int
    pickup_ns: int

    def since(self, before: RingStats) -> RingStats:
        """How much each has grown; 0 where it shrank, which no end in order lets happen."""
        return RingStats(*(max(0, now - then) for now, then in zip(self, before, strict=True)))
