"""What operators are told of traces."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from loomserve.platform.config import Tracing
from loomserve.platform.tracing.admin import build_tracing_router

PAGE = "http://localhost:16686/trace/{trace_id}"
COLLECTOR = "http://localhost:4317"


@pytest.mark.parametrize(
    ("tracing", "told"),
    [
        (None, {"enabled": False, "trace_url": None}),
        (Tracing(endpoint=COLLECTOR), {"enabled": True, "trace_url": None}),
        (Tracing(endpoint=COLLECTOR, trace_url=PAGE), {"enabled": True, "trace_url": PAGE}),
    ],
)
def test_whether_there_are_some_and_where_they_are_looked_at(
    tracing: Tracing | None, told: dict[str, object]
) -> None:
    app = FastAPI()
    app.include_router(build_tracing_router(tracing))
    assert TestClient(app).get("/tracing").json() == told
