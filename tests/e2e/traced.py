"""Requests whose traces a collector gets: those that say so, of platforms that begin none."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.unit.platform.tracing.collector import Collector, read

CLIENT_SPAN = "00f067aa0ba902b7"


def tracing(collector: Collector) -> dict[str, Any]:
    """The section ``server.tracing`` of a platform that begins no trace by itself."""
    return {"endpoint": collector.url, "sample": 0.0}


@dataclass(frozen=True)
class Traced:
    """A trace that a client begins."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    sampled: bool = True

    @property
    def headers(self) -> dict[str, str]:
        return {"traceparent": f"00-{self.id}-{CLIENT_SPAN}-{int(self.sampled):02x}"}

    def spans(self, collector: Collector, *names: str) -> list[Span]:
        """Its spans by their beginnings, once they are those; each is the first one's child."""
        server, *others = collector.wait_for(self.id, *names)
        assert server.parent_span_id.hex() == CLIENT_SPAN
        for each in others:
            assert each.parent_span_id == server.span_id, each.name
            assert server.start_time_unix_nano <= each.start_time_unix_nano
            assert each.end_time_unix_nano <= server.end_time_unix_nano
        return [server, *others]


def told(span: Span) -> dict[str, Any]:
    """A span's attributes, without the names before their last dot."""
    return {name.rpartition(".")[2]: value for name, value in read(span.attributes).items()}


def events(span: Span) -> list[tuple[str, dict[str, Any]]]:
    """Names and attributes of what happened in it, the latter likewise."""
    return [
        (
            each.name,
            {name.rpartition(".")[2]: value for name, value in read(each.attributes).items()},
        )
        for each in span.events
    ]


def seconds(span: Span) -> float:
    return float(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
