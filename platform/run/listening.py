"""Where the processes of a run listen: nothing but the server is for other machines."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

import psutil

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.loopback import is_loopback


def check_listening(
    processes: Iterable[psutil.Process], server_ports: Collection[int], node: str | None = None
) -> None:
    """Check that nothing but the server listens beyond loopback, or the cluster's network.

    ``processes`` are the platform's on this machine, and ``node`` its address in the cluster's
    network. ``StartError`` says which process and port do.
    """
    found = "; ".join(_elsewhere(processes, server_ports, node))
    if found:
        raise StartError(
            f"other machines could reach what is for the platform alone: {found}. Install the "
            "versions of Ray and vLLM that Loomserve was tested with (make install)"
        )


def _elsewhere(
    processes: Iterable[psutil.Process], server_ports: Collection[int], node: str | None
) -> Iterator[str]:
    for process in processes:
        try:
            name, sockets = process.name(), process.net_connections("tcp")
        except psutil.Error:  # it has just ended
            continue
        for one in sockets:
            listens = one.status == psutil.CONN_LISTEN and one.laddr.port not in server_ports
            if listens and not is_loopback(one.laddr.ip) and one.laddr.ip != node:
                yield f"process {process.pid} ({name}) listens on {one.laddr.ip}:{one.laddr.port}"
