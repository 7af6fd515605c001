"""The Ray node that this process belongs to."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import ray

from loomserve.platform.nodes.node import STATE_VARIABLE
from loomserve.platform.nodes.resources import name_in


def node_address() -> str:
    """The address of the node, as Ray knows it."""
    return str(ray.util.get_node_ip_address())


def living_nodes() -> frozenset[str]:
    """The names of the platform's nodes that are up, as Ray knows it."""
    up = (name_in(node["Resources"]) for node in ray.nodes() if node["Alive"])
    return frozenset(name for name in up if name is not None)


def own_node() -> str | None:
    """The name of the node that this process is on."""
    own = ray.get_runtime_context().get_node_id()
    there = (node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    return next(map(name_in, there), None)


def session_folder() -> Path:
    """Ray's own folder on this node, which ends with the platform."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


def wishes_folder(internal_token: str) -> Path:
    """Folder of what operators wish of the platform that has this token.

    It is found again by whichever controller comes next, also when Ray on its node has been started
    again; a platform that comes next has another.
    """
    state = os.environ.get(STATE_VARIABLE)
    if state is None:
        # Ray's folder is this run's alone, and ends with it.
        return session_folder() / "loomserve"
    wishes = Path(state, "wishes")
    own = wishes / hashlib.sha256(internal_token.encode()).hexdigest()[:16]
    for former in wishes.glob("*"):
        if former != own:
            shutil.rmtree(former, ignore_errors=True)
    return own


def keep_calls_on_node() -> None:
    """Have Serve's server for calls of other deployments listen on loopback alone.

    Each replica starts one once its deployment is there, on all addresses, and no option tells it
    otherwise. So what it binds the server's port with is replaced in its module. It asks nobody
    for a token and unpickles what it is sent; calls go through Ray's actors, and never to it.
    """
    import ray.serve._private.replica as serve_replica

    add_port = serve_replica.add_port_to_grpc_server

    def on_node(server: Any, address: str) -> int:
        port = address.rpartition(":")[2]
        return int(add_port(server, f"127.0.0.1:{port}"))

    serve_replica.add_port_to_grpc_server = on_node
