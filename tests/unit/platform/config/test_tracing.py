"""Where traces go, as it is configured."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from loomserve.platform.config import Server, Tracing


def test_there_are_no_traces_by_default() -> None:
    assert Server().tracing is None


@pytest.mark.parametrize(
    ("endpoint", "protocol", "url"),
    [
        ("http://localhost:4317", "grpc", "http://localhost:4317"),
        ("https://[::1]:4317/", "grpc", "https://[::1]:4317"),
        ("http://collector:4318", "http/protobuf", "http://collector:4318/v1/traces"),
        ("http://collector:4318/", "http/protobuf", "http://collector:4318/v1/traces"),
        ("https://x.example/otlp", "http/protobuf", "https://x.example/otlp"),
    ],
)
def test_the_url_follows_from_the_protocol(endpoint: str, protocol: str, url: str) -> None:
    assert Tracing.model_validate({"endpoint": endpoint, "protocol": protocol}).url == url


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"endpoint": "localhost:4317"}, "is no URL"),
        ({"endpoint": "http://a b:4317"}, "is no URL"),
        ({"endpoint": "http://a:4317/v1/traces"}, "grpc cannot ask for"),
        ({"endpoint": "http://a", "sample": 1.5}, "less than or equal to 1"),
        ({"endpoint": "http://a", "sample": -0.1}, "greater than or equal to 0"),
        ({"endpoint": "http://a", "protocol": "thrift"}, "'grpc' or 'http/protobuf'"),
        ({"endpoint": "http://a", "headers": {"Api-Key": "x"}}, "should match pattern"),
        ({"endpoint": "http://a", "headers": {"api-key": "x\ny"}}, "should match pattern"),
        ({"endpoint": "http://a", "trace_url": "http://a/trace/"}, "is no page of a trace"),
        ({"endpoint": "http://a", "trace_url": "javascript:{trace_id}"}, "is no page of a trace"),
        ({"endpoint": "http://a", "trace_url": "http://a b/{trace_id}"}, "is no page of a trace"),
        ({}, "Field required"),
    ],
)
def test_what_is_wrong_is_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Tracing.model_validate(wrong)
