"""The Ray node that this process belongs to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray


def node_address() -> str:
    """The address of the node, as Ray knows it."""
    return str(ray.util.get_node_ip_address())


def session_folder() -> Path:
    """Ray's own folder on this node, which ends with the platform."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


def keep_calls_on_node() -> None:
    """Have Serve's server for calls of other deployments listen on the node's address alone.

    Each replica starts one once its deployment is there, on all addresses, and no option tells it
    otherwise. So what it binds the server's port with is replaced in its module.
    """
    import ray.serve._private.replica as serve_replica

    add_port = serve_replica.add_port_to_grpc_server

    def on_node(server: Any, address: str) -> int:
        port = address.rpartition(":")[2]
        return int(add_port(server, f"{node_address()}:{port}"))

    serve_replica.add_port_to_grpc_server = on_node
