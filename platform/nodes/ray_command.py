"""The command that starts Ray's processes on this machine: of a cluster's node, or of all of Ray.

It is given the ports of Ray's agents, since a raylet waits but 15 s for those that its agents
choose themselves, and ends: on a busy machine they take longer to begin.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import sys
from collections.abc import Mapping, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from loomserve.platform.base.files import replace_file
from loomserve.platform.base.plain_reason import last_line
from loomserve.platform.run.ray_environment import (
    DAEMONS_ENVIRONMENT,
    LOGICAL_CPUS,
    OBJECT_STORE_BYTES,
)

_AGENTS = ("dashboard-agent-grpc", "dashboard-agent-listen", "metrics-export", "runtime-env-agent")
RAYLET = "raylet"
_LEAST_PORT = 20_000
"""Ray's workers have those below by default."""
HEAD = ("--head", "--include-dashboard=false", "--no-monitor")
"""Of the node that has what a cluster has but once. Nodes come and go by themselves."""
LONE_ENVIRONMENT = {**DAEMONS_ENVIRONMENT, "RAY_START_HOOK": f"{__name__}.without_clients"}
"""Of the command that starts a Ray which is of this machine alone."""


def ray_command(
    ip: str, resources: Mapping[str, float], temporary: Path, *options: str
) -> list[str]:
    """The command that starts a node with address ``ip`` and Ray's folder ``temporary``. Without
    ``--block`` among the options it ends once Ray is up."""
    ports = zip(_AGENTS, free_ports(len(_AGENTS)), strict=True)
    return [
        *(sys.executable, "-m", "ray.scripts.scripts", "start"),
        f"--node-ip-address={ip}",
        f"--num-cpus={LOGICAL_CPUS}",
        # It is bound to its devices by Loomserve's resources; Ray's own would hide GPUs.
        "--num-gpus=0",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        f"--resources={json.dumps(dict(resources))}",
        f"--temp-dir={temporary}",
        *("--disable-usage-stats", "--log-color=false"),
        *(f"--{name}-port={port}" for name, port in ports),
        *options,
    ]


def lone_command(ip: str, port: int, resources: Mapping[str, float], temporary: Path) -> list[str]:
    """The command that starts a Ray of this machine alone, with its GCS at ``port``."""
    any_port = ("--min-worker-port=0", "--max-worker-port=0")
    options = (*HEAD, f"--port={port}", "--include-log-monitor=false", *any_port)
    return ray_command(ip, resources, temporary, *options)


def without_clients(parameters: Any, head: bool) -> None:
    """Have Ray start no server for clients of its own, which is 90 MB and a port: Ray's hook."""
    parameters.ray_client_server_port = None


def tell_listen_port(raylet: Sequence[str]) -> None:
    """Write the port that was given to a node's dashboard agent to where its raylet looks for it.
    Ray's command keeps it from the raylet, which would wait for the agent itself to write it."""
    words = " ".join(raylet)
    given = [
        re.search(rf"--{each}=(\S+)", words) for each in ("session_dir", "node_id", "listen-port")
    ]
    session, node, port = (each[1] if each is not None else "" for each in given)
    if session and node and port:
        replace_file(Path(session, f"dashboard_agent_listen_port_{node}"), port)


def free_ports(count: int) -> list[int]:
    """Ports that are free, below those that connections have: one of these may be taken before
    a process listens at it, which takes seconds."""
    candidates = [*range(_LEAST_PORT, _first_of_connections())]
    random.shuffle(candidates)
    with contextlib.ExitStack() as open_until_all_are_chosen:
        ports = list[int]()
        # At last one of those nevertheless.
        for port in chain(candidates, repeat(0)):
            if len(ports) == count:
                break
            chosen = open_until_all_are_chosen.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                chosen.bind(("", port))
                ports.append(chosen.getsockname()[1])
    return ports


def _first_of_connections() -> int:
    """The first port that Linux gives to a connection, or to whoever asks for any."""
    text = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    return int(text.split()[0])


def last_line_of(log: Path) -> str:
    """The last line of a log that says something; empty: none does, or it cannot be read."""
    with contextlib.suppress(OSError):
        return last_line(log.read_text(errors="replace"))
    return ""
