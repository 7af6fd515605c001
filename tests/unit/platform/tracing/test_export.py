"""Spans that are sent to a collector, as each protocol has them."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from loomserve.platform.config import Tracing
from loomserve.platform.tracing import RequestTracer
from loomserve.platform.tracing.export import make_exporter, make_provider
from tests.forks import python_with_vllm
from tests.unit.platform.tracing.collector import Collector, grpc_collector, http_collector, read
from tests.waiting import PATIENCE_S


def tracer(options: Tracing) -> RequestTracer:
    """As a process has it, but that it is not the whole process's."""
    provider = make_provider(options, node="n1")
    provider.add_span_processor(BatchSpanProcessor(make_exporter(options)))
    return RequestTracer(provider.get_tracer("test"), provider.shutdown)


@pytest.mark.parametrize(
    ("protocol", "collecting"), [("grpc", grpc_collector), ("http/protobuf", http_collector)]
)
def test_what_is_not_sent_yet_is_sent_at_the_end(
    protocol: str, collecting: Callable[[], AbstractContextManager[Collector]]
) -> None:
    with collecting() as collector:
        given = {"endpoint": collector.url, "protocol": protocol, "headers": {"api-key": "k"}}
        tracing = tracer(Tracing.model_validate(given))
        trace = tracing.begin("POST /v1/completions", {"a": 1})
        trace.begin("answer").end()
        trace.end(200)
        tracing.close()
        child, span = sorted(collector.spans, key=lambda each: each.name)[::-1]
        assert (child.name, span.name) == ("answer", "POST /v1/completions")
        assert child.trace_id.hex() == span.trace_id.hex() == trace.id
        assert child.parent_span_id == span.span_id
        assert read(span.attributes) == {"a": 1, "http.response.status_code": 200}
        assert collector.headers[0]["api-key"] == "k"
        (resource,) = collector.resources
        assert (resource["service.name"], resource["loomserve.node"]) == ("loomserve", "n1")


def test_a_collector_that_is_away_keeps_nobody() -> None:
    tracing = tracer(Tracing(endpoint="http://127.0.0.1:9"))
    began = time.monotonic()
    for _ in range(5000):
        tracing.begin("x", {}).end(200)
    # Were each to wait for it, they would take hours.
    assert time.monotonic() - began < PATIENCE_S
    tracing.close()
    assert time.monotonic() - began < 2 * PATIENCE_S


def test_vllms_spans_go_the_same_way() -> None:
    with grpc_collector() as collector:
        code = f"""
from vllm.tracing import SpanKind, extract_trace_context, instrument_manual
from loomserve.platform.config import Tracing
from loomserve.platform.tracing.export import start_tracing
tracer = start_tracing(Tracing(endpoint={collector.url!r}))
trace = tracer.begin("server", {{}})
headers = {{name.decode(): value.decode() for name, value in trace.headers}}
instrument_manual("llm_request", 1, context=extract_trace_context(headers), kind=SpanKind.SERVER)
trace.end(200)
tracer.close()
"""
        subprocess.run([*python_with_vllm(), "-c", code], check=True, timeout=PATIENCE_S)
        spans = {each.name: each for each in collector.spans}
        assert spans.keys() == {"llm_request", "server"}
        assert spans["llm_request"].parent_span_id == spans["server"].span_id
