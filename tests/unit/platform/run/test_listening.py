"""A process that other machines could reach fails the start; the server's own port does not."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from loomserve.platform.base.errors import StartError
from loomserve.platform.run.listening import check_listening


@pytest.mark.parametrize(
    ("host", "fits"),
    [("127.0.0.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("", False), ("::", False)],
)
def test_only_loopback_is_for_the_platform(host: str, fits: bool) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind((host, 0))
        sock.listen()
        port = sock.getsockname()[1]
        mine = [psutil.Process()]
        if fits:
            check_listening(mine, server_ports=[1])
        else:
            with pytest.raises(
                StartError, match=rf"process {os.getpid()} .* listens on \S*:{port}"
            ):
                check_listening(mine, server_ports=[1])
        check_listening(mine, server_ports=[1, port])
