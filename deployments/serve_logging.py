"""How much Serve's deployments write to their logs."""

from __future__ import annotations

from ray.serve.schema import LoggingConfig

QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)
