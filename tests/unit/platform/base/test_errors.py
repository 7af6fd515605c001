from __future__ import annotations

import math
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.platform.base import errors
from loomserve.platform.base.errors import RequestError

TABLE = [
    (errors.BadRequest, 400, "invalid_request_error", "invalid_request"),
    (errors.ContextTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (errors.UnexpectedBody, 400, "invalid_request_error", "unexpected_body"),
    (errors.Unauthorized, 401, "authentication_error", "invalid_api_key"),
    (errors.Forbidden, 403, "permission_error", "forbidden"),
    (errors.NotFound, 404, "invalid_request_error", "not_found"),
    (errors.NothingThere, 404, "invalid_request_error", "not_found"),
    (errors.UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (errors.MethodNotAllowed, 405, "invalid_request_error", "method_not_allowed"),
    (errors.RequestTimeout, 408, "timeout_error", "timeout"),
    (errors.Conflict, 409, "invalid_request_error", "conflict"),
    (errors.BodyTooLarge, 413, "invalid_request_error", "body_too_large"),
    (errors.UnsupportedBody, 415, "invalid_request_error", "unsupported_media_type"),
    (errors.TooManyRequests, 429, "rate_limit_error", "rate_limit_exceeded"),
    (errors.HeadTooLarge, 431, "invalid_request_error", "head_too_large"),
    (errors.InternalError, 500, "server_error", "internal_error"),
    (errors.EngineGone, 502, "server_error", "engine_gone"),
    (errors.Unavailable, 503, "server_error", "unavailable"),
    (errors.TakenOver, 503, "server_error", "unavailable"),
]


def _subclasses(root: type[RequestError]) -> set[type[RequestError]]:
    return {root}.union(*(_subclasses(child) for child in root.__subclasses__()))


@pytest.mark.parametrize(("error", "status", "kind", "code"), TABLE)
def test_each_error_has_its_status_and_openai_body(
    error: type[RequestError], status: int, kind: str, code: str
) -> None:
    assert error.status == status
    assert error("what to do").body() == {
        "error": {"message": "what to do", "type": kind, "param": None, "code": code}
    }


def test_the_table_names_every_request_error() -> None:
    assert {row[0] for row in TABLE} == _subclasses(RequestError) - {RequestError}


@pytest.mark.parametrize("error", [row[0] for row in TABLE])
def test_an_error_crosses_processes_whole(error: type[RequestError]) -> None:
    sent = error("why")
    sent.param, sent.code, sent.retry_after_s = "model", "special", 2.5
    received = pickle.loads(pickle.dumps(sent))
    assert type(received) is error
    assert (received.body(), received.headers()) == (sent.body(), sent.headers())


def test_param_and_reason_reach_the_body() -> None:
    error = errors.BadRequest("why", param="max_tokens", reason="too_many_tokens")
    assert error.body()["error"]["param"] == "max_tokens"
    assert error.body()["error"]["code"] == "too_many_tokens"


@pytest.mark.parametrize(
    ("wait_s", "header"),
    [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.0004, "2"), (1.5, "2"), (59.001, "60")],
)
def test_retry_after_is_whole_seconds_rounded_up(wait_s: float, header: str) -> None:
    assert errors.TooManyRequests("later", retry_after_s=wait_s).headers() == {
        "Retry-After": header
    }


@given(st.floats(min_value=0, max_value=1e6))
def test_who_waits_for_retry_after_has_waited_long_enough(wait_s: float) -> None:
    header = int(errors.Unavailable("later", retry_after_s=wait_s).headers()["Retry-After"])
    assert wait_s <= header <= max(1, math.floor(wait_s) + 1)


@pytest.mark.parametrize(
    ("error", "headers"),
    [
        (errors.BadRequest("why"), {}),
        (errors.Unauthorized("why"), {"WWW-Authenticate": "Bearer"}),
        (errors.MethodNotAllowed("why", allow="GET, POST"), {"Allow": "GET, POST"}),
        (errors.RequestTimeout("why"), {"Connection": "close"}),
        (errors.BodyTooLarge("why"), {"Connection": "close"}),
    ],
)
def test_the_headers_a_status_requires_are_there(
    error: RequestError, headers: dict[str, str]
) -> None:
    assert error.headers() == headers
