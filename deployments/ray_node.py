"""The Ray node that this process belongs to."""

from __future__ import annotations

from pathlib import Path

import ray


def node_address() -> str:
    """The address Ray itself uses: loopback if the platform was started for loopback."""
    return str(ray.util.get_node_ip_address())


def session_folder() -> Path:
    """Ray's own folder on this node, which ends with the platform."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())
