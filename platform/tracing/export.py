"""Sends a process's spans to a collector; importing this imports OpenTelemetry's SDK."""

from __future__ import annotations

import os
from importlib.metadata import version

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from loomserve.platform.config import Tracing
from loomserve.platform.tracing.request_trace import RequestTracer

# A collector that is away must not keep a process from ending.
_TIMEOUT_S = 5


def start_tracing(options: Tracing, *, node: str | None = None) -> RequestTracer:
    """Send this process's spans, with those of vLLM in it, from now on. A thread sends them from
    a bounded queue; what does not fit while a collector is slow or away is lost."""
    provider = make_provider(options, node=node)
    provider.add_span_processor(BatchSpanProcessor(make_exporter(options)))
    # vLLM's tracer asks for the process's.
    trace.set_tracer_provider(provider)
    return RequestTracer(provider.get_tracer("loomserve"), provider.shutdown)


def make_provider(options: Tracing, *, node: str | None = None) -> TracerProvider:
    """A provider of spans that are sampled as the options say, and sent nowhere yet."""
    attributes: dict[str, str | int] = {
        "service.version": version("loomserve"),
        "process.pid": os.getpid(),
    }
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = "loomserve"
    if node is not None:
        attributes["loomserve.node"] = node
    return TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(options.sample)),
        resource=Resource.create(attributes),
        shutdown_on_exit=False,
    )


def make_exporter(options: Tracing) -> SpanExporter:
    if options.protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(options.url, headers=dict(options.headers), timeout=_TIMEOUT_S)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpSpanExporter,
    )

    return HttpSpanExporter(options.url, headers=dict(options.headers), timeout=_TIMEOUT_S)
