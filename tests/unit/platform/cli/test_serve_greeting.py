"""The question that the platform asks itself when it is ready."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from loomserve.platform.cli.serve import _first_answer


@pytest.fixture
def refusing() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "no chat template"}}')

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_model_that_does_not_chat_is_served_all_the_same(refusing: str) -> None:
    assert "no chat template" in _first_answer(refusing, "{}")


def test_a_platform_that_does_not_answer_yet_goes_on() -> None:
    assert "has not answered" in _first_answer("http://127.0.0.1:1", "{}")
