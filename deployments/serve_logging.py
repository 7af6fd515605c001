"""How much Serve's deployments write to their logs, and how."""

from __future__ import annotations

import logging

from ray.serve.schema import LoggingConfig

from loomserve.platform.base.request_logs import add_request
from loomserve.platform.config import LogFormat

_SERVE = "ray.serve"
# Their lines would go to the standard error stream, of which Serve's log takes none.
_OTHERS = ("loomserve", "opentelemetry")


def serve_logging(log_format: LogFormat) -> LoggingConfig:
    """A deployment's: warnings and errors alone."""
    encoding = "JSON" if log_format == "json" else "TEXT"
    return LoggingConfig(log_level="WARNING", enable_access_log=False, encoding=encoding)


def log_requests(log_format: LogFormat) -> None:
    """Have this replica's log take all lines of the platform's, and tell their requests in JSON."""
    handlers = logging.getLogger(_SERVE).handlers
    for handler in handlers if log_format == "json" else ():
        # The last of its filters, for Serve's own writes ids of its calls.
        handler.addFilter(add_request)
    for name in _OTHERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = handlers
        logger.propagate = False
        logger.setLevel(logging.WARNING)
