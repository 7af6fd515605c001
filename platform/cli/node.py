"""``loomserve node``: makes this machine a node of a cluster, until Ctrl-C."""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from loomserve.deployments.forked_worker import preloaded
from loomserve.platform.base.descriptors import raise_limit
from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.base.loopback import is_loopback
from loomserve.platform.config.base import Name
from loomserve.platform.config.cluster import ClusterAddress
from loomserve.platform.devices.gpus import vllm_is_for
from loomserve.platform.engine.process.kept_fork_server import KeptForkServer
from loomserve.platform.nodes.node import NodeOptions, SupervisedNode, make_state_folder
from loomserve.platform.nodes.token import read_or_make_token, read_token, token_path
from loomserve.platform.run.ending import EndSignals, show_tracebacks

_DEFAULT_PORT = 6379
_PORTS = re.compile(r"^(\d{4,5})-(\d{4,5})$")


def _debug(asked: bool) -> None:
    if asked:
        show_tracebacks()


Debug = Annotated[
    bool,
    typer.Option("--debug", help="Show where in the code an error was raised.", callback=_debug),
]


def node(
    head: Annotated[
        bool, typer.Option("--head", help="Be the cluster's head, which all others join.")
    ] = False,
    address: Annotated[
        str | None,
        typer.Option(
            envvar="RAY_ADDRESS",
            help="HOST:PORT of the head; of the head itself, where it listens.",
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What devices in the configuration call it; the host name.")
    ] = None,
    ip: Annotated[
        str | None, typer.Option(help="Its own address; that by which it reaches the head.")
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option(help="Folder for what there is but once; of one node, which runs serve."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the cluster's token, the same on all nodes.")
    ] = None,
    ports: Annotated[
        str | None, typer.Option(help="FIRST-LAST of the ports for Ray's workers; any.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Run a node of a cluster until Ctrl-C; Ray is started again whenever it ends."""
    os.umask(0o077)
    raise_limit()
    options = _options(head, address, name, ip, state, token_file, ports)
    make_forks = partial(KeptForkServer, preloaded=preloaded(vllm_is_for()))
    # The guard ends what a node is that is ended at once.
    ends = EndSignals()
    ends.catch()
    print_line(f"starting node {options.name}; the head is {options.head[0]}:{options.head[1]}")
    SupervisedNode(options, print_line, make_forks, ends.asked).run()
    print_line(f"node {options.name} is stopped")


def print_line(text: str) -> None:
    print(text, flush=True)


def _options(
    head: bool,
    address: str | None,
    name: str | None,
    ip: str | None,
    state: Path | None,
    token_file: Path | None,
    ports: str | None,
) -> NodeOptions:
    """Raises ConfigError if an option is wrong, or one is missing; StartError if the token or the
    folder is not as it must be, or the head has no address."""
    if address is None and not head:
        raise ConfigError("--address: say HOST:PORT of the head, or --head to be it")
    where = _checked("--address", ClusterAddress, address) if address else None
    host, port = _split(where) if where else ("", _DEFAULT_PORT)
    own = _checked("--ip", IPv4Address, ip) if ip else _own_address(host, head=head)
    if is_loopback(own):
        raise StartError(
            f"{own} is of this machine alone, where other nodes cannot reach it: give its address "
            "in the cluster's network by --ip"
        )
    path = token_path(token_file)
    return NodeOptions(
        name=_checked("--name", Name, name or socket.gethostname()),
        head=(own if head else host, port),
        is_head=head,
        ip=own,
        token=read_or_make_token(path) if head else read_token(path),
        state=make_state_folder(state.expanduser()) if state is not None else None,
        ports=_port_range(ports) if ports else None,
    )


def _checked(option: str, kind: Any, value: str) -> str:
    try:
        return str(TypeAdapter(kind).validate_python(value))
    except ValidationError as error:
        raise ConfigError(f"{option} {value!r}: {error.errors()[0]['msg']}") from None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _port_range(given: str) -> tuple[int, int]:
    match = _PORTS.match(given)
    if match is None or not int(match[1]) < int(match[2]) < 2**16:
        raise ConfigError(f"--ports {given!r}: write FIRST-LAST, such as 20000-20999")
    return int(match[1]), int(match[2])


def _own_address(host: str, *, head: bool) -> str:
    """This machine's address: the head's own, or that by which it reaches a host."""
    # Nothing is sent: the kernel only says from where it would.
    asked = host or "192.0.2.1"
    try:
        found = socket.getaddrinfo(asked, 9, socket.AF_INET, socket.SOCK_DGRAM)
        target = found[0][4]
        if head and host:
            return str(target[0])
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise StartError(
            f"this machine has no way to {asked} ({error.strerror}): look at --address, or give "
            "its own address by --ip"
        ) from None
