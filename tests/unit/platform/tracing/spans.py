"""A tracer whose spans stay in memory."""

from __future__ import annotations

from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from loomserve.platform.config import Tracing
from loomserve.platform.tracing import RequestTrace, RequestTracer
from loomserve.platform.tracing.export import make_provider

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN_ID = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-01"
UNSAMPLED = f"00-{TRACE_ID}-{SPAN_ID}-00"


class Spans:
    """What has ended of a tracer's spans, oldest first."""

    def __init__(self, sample: float = 1.0) -> None:
        self._exporter = InMemorySpanExporter()
        provider = make_provider(Tracing(endpoint="http://localhost:4317", sample=sample))
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = RequestTracer(provider.get_tracer("test"), provider.shutdown)

    def begin(self) -> RequestTrace:
        return self.tracer.begin("POST /v1/completions", {})

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.all]

    def one(self, name: str) -> ReadableSpan:
        (found,) = (each for each in self.all if each.name == name)
        return found


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def events(span: ReadableSpan) -> dict[str, dict[str, Any]]:
    """By their names, of which each is there once."""
    found = {each.name: dict(each.attributes or {}) for each in span.events}
    assert len(found) == len(span.events)
    return found


def parent_of(span: ReadableSpan) -> int | None:
    return None if span.parent is None else span.parent.span_id


def id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.span_id
