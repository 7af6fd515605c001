"""Which request a line of a process's log is about."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class LoggedRequest:
    """What log lines about a request contain, as far as it is known."""

    request_id: str
    model: str | None = None
    trace_id: str | None = None


logged_request: ContextVar[LoggedRequest | None] = ContextVar("logged_request", default=None)
"""The request at hand, in processes whose logs contain it."""


def add_request(record: logging.LogRecord) -> bool:
    """A filter that lets all pass, and gives each record the fields of the request at hand."""
    request = logged_request.get()
    if request is not None:
        record.request_id = request.request_id
        for name in ("model", "trace_id"):
            value = getattr(request, name)
            if value is not None:
                setattr(record, name, value)
    return True
