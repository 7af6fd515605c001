"""How a lender's tasks are served (:class:`.server.KernelServer`)."""

from __future__ import annotations

from enum import StrEnum


class Form(StrEnum):
    """By a thread, by it and polls within steps, or by a kernel that stays."""

    STREAM = "stream"
    POLLS = "polls"
    RESIDENT = "resident"
