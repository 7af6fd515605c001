"""A collector of OpenTelemetry's, by gRPC or HTTP, that keeps what it is sent."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """What came, with each message's headers."""

    def __init__(self) -> None:
        self.url = ""
        self.headers: list[dict[str, str]] = []
        self.resources: list[dict[str, Any]] = []
        self._spans: list[Span] = []
        self._lock = threading.Lock()

    def take(self, sent: ExportTraceServiceRequest, headers: dict[str, str]) -> None:
        with self._lock:
            self.headers.append(headers)
            for each in sent.resource_spans:
                self.resources.append(read(each.resource.attributes))
                self._spans += [span for scope in each.scope_spans for span in scope.spans]

    @property
    def spans(self) -> list[Span]:
        with self._lock:
            return list(self._spans)

    def of(self, trace_id: str) -> list[Span]:
        """A trace's spans, by their beginnings."""
        found = (each for each in self.spans if each.trace_id.hex() == trace_id)
        return sorted(found, key=lambda each: each.start_time_unix_nano)

    def wait_for(self, trace_id: str, *names: str, timeout_s: float = 30) -> list[Span]:
        """A trace's spans, by their beginnings, once those of these names have come."""
        deadline = time.monotonic() + timeout_s
        while sorted(each.name for each in self.of(trace_id)) != sorted(names):
            assert time.monotonic() < deadline, [each.name for each in self.of(trace_id)]
            time.sleep(0.1)
        return self.of(trace_id)


def read(attributes: Iterable[KeyValue]) -> dict[str, Any]:
    def value(any_value: AnyValue) -> Any:
        return getattr(any_value, any_value.WhichOneof("value") or "string_value")

    return {each.key: value(each.value) for each in attributes}


class _Servicer(TraceServiceServicer):
    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def Export(  # noqa: N802 - gRPC names it
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        self._collector.take(request, dict(context.invocation_metadata()))
        return ExportTraceServiceResponse()


@contextmanager
def grpc_collector() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(_Servicer(collector), server)  # type: ignore[no-untyped-call]
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(None).wait()


@contextmanager
def http_collector() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            good = self.path == "/v1/traces"
            if good:
                headers = {name.lower(): value for name, value in self.headers.items()}
                collector.take(ExportTraceServiceRequest.FromString(body), headers)
            self.send_response(200 if good else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
