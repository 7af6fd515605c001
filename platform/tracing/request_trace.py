"""One request's trace: its server span, and what is told under it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry.context import Context
from opentelemetry.trace import Span, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Attributes = Mapping[str, str | bool | int | float]

__all__ = ["PROPAGATOR", "Attributes", "RequestTrace", "Span"]

PROPAGATOR = TraceContextTextMapPropagator()
_SERVER_ERROR = 500


class RequestTrace:
    """A request's server span; who has one that is not :attr:`recorded` need tell it nothing."""

    __slots__ = ("_answers", "_context", "_prompts", "_span", "_tracer", "id", "recorded")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer, self._span = tracer, span
        self._context = set_span_in_context(span, Context())
        self._prompts: dict[str, int] = {}
        self._answers = 0
        self.id = f"{span.get_span_context().trace_id:032x}"
        """The trace's, 32 hexadecimal digits."""
        self.recorded = span.is_recording()
        """Whether it is one of those that are sent."""

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """W3C's headers, by which spans of others become this one's children."""
        told: dict[str, str] = {}
        PROPAGATOR.inject(told, self._context)
        return [(name.encode(), value.encode()) for name, value in told.items()]

    @property
    def response_header(self) -> tuple[bytes, bytes]:
        """W3C's ``traceresponse``, which tells the client the trace's id."""
        told = self._span.get_span_context()
        value = f"00-{told.trace_id:032x}-{told.span_id:016x}-{told.trace_flags:02x}"
        return b"traceresponse", value.encode()

    def tell(self, attributes: Attributes) -> None:
        """Set attributes of the server span."""
        if self._span.is_recording():
            self._span.set_attributes(attributes)

    def event(self, name: str, attributes: Attributes | None = None) -> None:
        """Note that something happens now."""
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
        """The client was told of an error, by its code."""
        self.tell({"error.type": code})

    def end(self, status: int | None) -> None:
        """
        Args:
            status: of the HTTP response; None: there was none.
        """
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
