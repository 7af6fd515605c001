"""Traces of requests: each begins here or goes on with a client's, and has a server span."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | bool | int | float]

__all__ = ["Attributes", "RequestTrace", "RequestTracer", "Span"]

_PROPAGATOR = TraceContextTextMapPropagator()
_SERVER_ERROR = 500
_TRACEPARENT = b"traceparent"
_TRACESTATE = b"tracestate"


class RequestTrace:
    """A request's server span; one that is not :attr:`recorded` needs no attributes."""

    __slots__ = ("_answers", "_context", "_prompts", "_span", "_tracer", "id", "recorded")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span, Context())
        self._prompts: dict[str, int] = {}
        self._answers = 0
        self.id = f"{span.get_span_context().trace_id:032x}"
        self.recorded = span.is_recording()
        """Whether it is one of those that are sent."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """W3C's headers, by which spans of others become this one's children."""
        told: dict[str, str] = {}
        _PROPAGATOR.inject(told, self._context)
        return [(name.encode(), value.encode()) for name, value in told.items()]

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        """W3C's ``traceresponse``, which tells the client the trace's id."""
        told = self._span.get_span_context()
        value = f"00-{told.trace_id:032x}-{told.span_id:016x}-{told.trace_flags:02x}"
        return b"traceresponse", value.encode()

    def tell(self, attributes: Attributes) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        if self._span.is_recording():
            self._span.add_event(name, attributes)

    def begin(self, name: str, attributes: Attributes | None = None) -> Span:
        """A child of the server span, which the caller ends."""
        return self._tracer.start_span(name, context=self._context, attributes=attributes)

    @contextmanager
    def during(self, name: str, attributes: Attributes | None = None) -> Iterator[None]:
        """A child of the server span for as long as this lasts; an error is noted in it."""
        span = self.begin(name, attributes)
        try:
            yield
        except BaseException as error:
            span.set_status(StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            span.end()

    def add_tokens(self, prompt: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Count a sequence that has ended; of a prompt's several answers each is one."""
        self._prompts[prompt] = prompt_tokens
        self._answers += answer_tokens

    def failed(self, code: str) -> None:
        self.tell({"error.type": code})

    def end(self, status: int | None) -> None:
        """End the span with the HTTP response's status; None: there was no response."""
        if not self._span.is_recording():
            return
        if self._prompts:
            self._span.set_attribute("gen_ai.usage.input_tokens", sum(self._prompts.values()))
            self._span.set_attribute("gen_ai.usage.output_tokens", self._answers)
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= _SERVER_ERROR:
            self._span.set_status(StatusCode.ERROR)
        self._span.end()


class RequestTracer:
    def __init__(self, tracer: Tracer, close: Callable[[], None]) -> None:
        """``close`` sends what was not sent yet, and takes no more; it may take seconds."""
        self._tracer = tracer
        self.close = close

    def begin(
        self, name: str, attributes: Attributes, *, headers: Iterable[tuple[bytes, bytes]] = ()
    ) -> RequestTrace:
        """The trace of a request, the client's own if ``headers`` have one; few ``name``s."""
        span = self._tracer.start_span(
            name, context=_told(headers), kind=SpanKind.SERVER, attributes=attributes
        )
        return RequestTrace(self._tracer, span)


def _told(headers: Iterable[tuple[bytes, bytes]]) -> Context:
    """The client's span; if headers name several, none."""
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
    return _PROPAGATOR.extract(carrier, Context())
