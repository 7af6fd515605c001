"""What a gateway's log says of requests, through Serve's own handlers."""

from __future__ import annotations

import builtins
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.common import ServeComponentType
from ray.serve._private.logging_utils import configure_component_logger

from loomserve.deployments.serve_options import log_requests, serve_logging
from loomserve.platform.base.request_logs import LoggedRequest, logged_request
from loomserve.platform.config import LogFormat
from tests.unit.loggers import loggers_as_they_were


@pytest.fixture(autouse=True)
def _loggers_as_they_were(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Serve takes over loggers, streams and ``print`` of its processes."""
    monkeypatch.setattr(builtins, "print", print)
    monkeypatch.setattr(sys, "stdout", sys.stdout)
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    with loggers_as_they_were():
        yield


def logged_lines(folder: Path, log_format: LogFormat) -> list[str]:
    """A gateway's log after a request failed, and something else did."""
    config = serve_logging(log_format).model_copy(update={"logs_dir": str(folder)})
    configure_component_logger(
        component_name="app_Gateway",
        component_id="g1",
        component_type=ServeComponentType.REPLICA,
        logging_config=config,
        max_bytes=2**20,
        backup_count=1,
    )
    log_requests(log_format)
    token = logged_request.set(LoggedRequest("r1", "chat", "4bf9"))
    try:
        logging.getLogger("ray.serve").error("request %s failed", "r1")
        logging.getLogger("loomserve.ingress").error("request failed, too")
    finally:
        logged_request.reset(token)
    logging.getLogger("ray.serve").warning("the controller is away")
    logging.getLogger("ray.serve").info("not worth a line")
    (path,) = folder.glob("*.log")
    return path.read_text().splitlines()


def test_lines_of_json_tell_their_request(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = [json.loads(line) for line in logged_lines(tmp_path, "json")]
    assert [each["message"] for each in found] == [
        "request r1 failed",
        "request failed, too",
        "the controller is away",
    ]
    assert [each["levelname"] for each in found] == ["ERROR", "ERROR", "WARNING"]
    for each in found[:2]:
        assert (each["request_id"], each["model"], each["trace_id"]) == ("r1", "chat", "4bf9")
    assert not {"model", "trace_id"} & found[2].keys()


def test_lines_of_text_are_serves_own(tmp_path: Path) -> None:
    lines = logged_lines(tmp_path, "text")
    assert [line.rsplit(" -- ", 1)[-1] for line in lines] == [
        "request r1 failed",
        "request failed, too",
        "the controller is away",
    ]
