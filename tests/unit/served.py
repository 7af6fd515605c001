"""An application behind a real port, for what asks it over HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from loomserve.platform.http.server import listen


@contextmanager
def served(app: FastAPI) -> Iterator[str]:
    """The URL, which can be asked at once."""
    sock = listen("127.0.0.1", 0)
    # Who connects before the server has started waits; it would be refused at a bound socket.
    sock.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run, args=([sock],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
