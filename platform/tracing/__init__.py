"""Traces of requests in OpenTelemetry's terms; :mod:`.export` alone imports its SDK.

A process has one provider, which vLLM's tracer in it uses, too.
"""

from loomserve.platform.tracing.request_trace import Attributes, RequestTrace, RequestTracer, Span

__all__ = ["Attributes", "RequestTrace", "RequestTracer", "Span"]
