"""Begins traces, or goes on with those of clients."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Tracer

from loomserve.platform.tracing.request_trace import PROPAGATOR, Attributes, RequestTrace

_TRACEPARENT = b"traceparent"
_TRACESTATE = b"tracestate"


class RequestTracer:
    """A process's traces of requests."""

    def __init__(self, tracer: Tracer, close: Callable[[], None]) -> None:
        """``close``: sends what was not sent yet, and takes no more; it may take seconds."""
        self._tracer = tracer
        self.close = close

    def begin(
        self,
        name: str,
        attributes: Attributes,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> RequestTrace:
        """The trace of a request, which is the client's own if its headers tell one.

        Args:
            name: of the request's span; few requests have one of their own.
            attributes: what is known of it.
            headers: as ASGI has them, names in lower case.
        """
        span = self._tracer.start_span(
            name, context=_told(headers), kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestTrace(self._tracer, span)


def _told(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The client's span; whoever tells several tells none."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in headers:
        if name == _TRACEPARENT:
            parents.append(value.decode("latin-1"))
        elif name == _TRACESTATE:
            states.append(value.decode("latin-1"))
    if len(parents) != 1:
        return Context()
    carrier = {"traceparent": parents[0]}
    if states:
        carrier["tracestate"] = ",".join(states)
    return PROPAGATOR.extract(carrier, Context())
