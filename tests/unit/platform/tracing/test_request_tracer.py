"""Which trace a request's span is part of, whether it is sent, and what others are told of it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.trace import SpanKind, StatusCode

from tests.unit.platform.tracing.spans import (
    SAMPLED,
    SPAN_ID,
    TRACE_ID,
    UNSAMPLED,
    Spans,
    attributes,
    events,
    id_of,
    parent_of,
)
from tests.waiting import PATIENCE_S


def headers(*parents: str) -> list[tuple[bytes, bytes]]:
    return [(b"traceparent", each.encode("latin-1")) for each in parents]


def test_a_clients_trace_goes_on() -> None:
    spans = Spans(sample=0)
    given = [*headers(SAMPLED), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    trace = spans.tracer.begin("POST /v1/completions", {"x": 1}, headers=given)
    assert trace.recorded
    assert trace.id == TRACE_ID
    trace.end(200)
    (span,) = spans.all
    assert (span.name, span.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert parent_of(span) == int(SPAN_ID, 16)
    assert attributes(span) == {"x": 1, "http.response.status_code": 200}
    own = f"00-{TRACE_ID}-{id_of(span):016x}-01".encode()
    assert trace.headers == [(b"traceparent", own), (b"tracestate", b"a=1,b=2")]
    assert trace.response_header == (b"traceresponse", own)
    assert dict(span.resource.attributes)["service.name"] == "loomserve"


def test_a_client_may_have_its_trace_not_sent() -> None:
    spans = Spans(sample=1)
    trace = spans.tracer.begin("x", {}, headers=headers(UNSAMPLED))
    assert not trace.recorded
    assert trace.id == TRACE_ID
    with trace.during("child"):
        trace.event("event")
    trace.end(200)
    assert spans.all == ()
    # Whoever comes next must not begin a trace of its own.
    ((_, told),) = trace.headers
    assert told.startswith(f"00-{TRACE_ID}-".encode())
    assert told.endswith(b"-00")


@pytest.mark.parametrize(
    "given",
    [
        (),
        (SAMPLED, SAMPLED),
        ("",),
        ("nonsense",),
        (SAMPLED.replace(TRACE_ID, "0" * 32),),
        ("ff" + SAMPLED[2:],),
        ("é" * 55,),
    ],
)
def test_without_one_valid_header_a_trace_begins_here(given: tuple[str, ...]) -> None:
    spans = Spans(sample=1)
    trace = spans.tracer.begin("x", {}, headers=headers(*given))
    trace.end(200)
    (span,) = spans.all
    assert span.parent is None
    assert trace.id not in (TRACE_ID, "0" * 32)


def test_a_share_of_the_traces_that_begin_here_is_sent() -> None:
    assert not Spans(sample=0).begin().recorded
    spans = Spans(sample=0.25)
    recorded = sum(spans.begin().recorded for _ in range(2000))
    assert 400 < recorded < 600


def test_children_and_tokens_of_a_request() -> None:
    spans = Spans()
    trace = spans.begin()
    with pytest.raises(KeyError), trace.during("wait", {"a": "b"}):
        raise KeyError
    trace.event("route", {"replica": "r1"})
    # Two answers to one prompt, and one to another.
    trace.add_tokens("p", 5, 7)
    trace.add_tokens("p", 5, 8)
    trace.add_tokens("q", 3, 1)
    trace.end(502)
    trace.event("too late")
    trace.end(200)
    wait, server = spans.all
    assert (wait.name, attributes(wait)) == ("wait", {"a": "b"})
    assert wait.status.status_code is StatusCode.ERROR
    assert parent_of(wait) == id_of(server)
    assert events(server) == {"route": {"replica": "r1"}}
    assert attributes(server) == {
        "gen_ai.usage.input_tokens": 8,
        "gen_ai.usage.output_tokens": 16,
        "http.response.status_code": 502,
    }
    assert server.status.status_code is StatusCode.ERROR


def test_whoever_does_not_trace_does_not_import_the_sdk() -> None:
    code = (
        "import sys, loomserve.platform.http.ingress, loomserve.deployments.gateway.gateway; "
        "sys.exit('loomserve.platform.tracing.export' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE_S).returncode == 0
