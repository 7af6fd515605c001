"""The Ray node that this process belongs to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray._private.state as ray_state

from loomserve.platform.nodes.node import STATE_VARIABLE
from loomserve.platform.nodes.resources import STATE, name_in


def node_address() -> str:
    return str(ray.util.get_node_ip_address())


_DRAIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class LivingNode:
    """
    Attributes:
        ray_id: Ray's own id of it, another one each time that it joins.
        has_state: Whether it has what there is but once.
        is_leaving: Whether Ray starts nothing on it, and will end it.
    """

    ray_id: str
    has_state: bool
    is_leaving: bool = False


def living_nodes() -> dict[str, LivingNode]:
    """The platform's nodes that are up, as Ray knows it, by name."""
    # Serve asks for it likewise; what is public does not say it.
    leaving = ray_state.state.get_draining_nodes()
    return {
        name: LivingNode(node["NodeID"], STATE in node["Resources"], node["NodeID"] in leaving)
        for node in ray.nodes()
        if node["Alive"] and (name := name_in(node["Resources"])) is not None
    }


def drain_node(ray_id: str, deadline_s: float) -> None:
    """Have Ray move what it has on a node elsewhere, and end the node by the deadline at last. By
    Ray's own command, which has no public counterpart; RuntimeError: it refuses."""
    options = {
        "address": ray.get_runtime_context().gcs_address,
        "node-id": ray_id,
        "reason": "DRAIN_NODE_REASON_PREEMPTION",
        "reason-message": "drained by an operator of Loomserve",
        "deadline-remaining-seconds": str(int(deadline_s)),
    }
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ray.scripts.scripts", "drain-node"),
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        capture_output=True,
        text=True,
        timeout=_DRAIN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"Ray does not drain the node: {done.stderr.strip()[-500:]}")


def own_node() -> str | None:
    own = ray.get_runtime_context().get_node_id()
    there = (node["Resources"] for node in ray.nodes() if node["NodeID"] == own)
    return next(map(name_in, there), None)


def session_folder() -> Path:
    """Ray's own folder on this node, which ends with the platform."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name())


def wishes_folder() -> Path:
    """Folder of operators' wishes, found again by the next controller, on a restarted Ray, too."""
    state = os.environ.get(STATE_VARIABLE)
    if state is None:
        # Ray's folder is this run's alone, and ends with it.
        return session_folder() / "loomserve"
    return Path(state, "wishes")


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
