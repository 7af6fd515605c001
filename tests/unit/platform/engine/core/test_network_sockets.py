"""An engine's sockets over TCP: for who has the keys, while its Unix sockets stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from loomserve.platform.engine.core.network_sockets import NetworkSockets
from loomserve.platform.engine.core.output_sender import bound_router
from loomserve.platform.run.engine_address import EngineAddress, EngineNetwork

ANSWER_MS = 5000
SILENCE_MS = 500


class Engine:
    """Two bound sockets; it answers what it hears when told to."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        sockets = NetworkSockets("127.0.0.1")
        local = EngineAddress.in_folder(folder)
        self.heard: list[bytes] = []
        self._sockets = []
        for name, address in (("input", local.input), ("output", local.output)):
            context = stack.enter_context(zmq.Context())
            socket = stack.enter_context(bound_router(context, address))
            socket.setsockopt(zmq.LINGER, 0)
            stack.enter_context(sockets.bound(name, context, socket))
            self._sockets.append(socket)
        self.address = local.with_network(sockets.address)

    def answer(self, timeout_ms: int) -> None:
        for socket in self._sockets:
            if socket.poll(timeout_ms):
                identity, said = socket.recv_multipart()
                self.heard.append(said)
                socket.send_multipart([identity, said])


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(stack, tmp_path)


def asked(engine: Engine, address: str, network: EngineNetwork | None) -> bytes | None:
    """The answer to whoever connects there; None: there is none."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        if network is not None:
            socket.setsockopt_string(zmq.CURVE_SERVERKEY, network.server_key)
            socket.setsockopt_string(zmq.CURVE_PUBLICKEY, network.client_key)
            socket.setsockopt_string(zmq.CURVE_SECRETKEY, network.client_secret)
        socket.connect(address)
        socket.send(b"hello")
        engine.answer(SILENCE_MS)
        return socket.recv() if socket.poll(SILENCE_MS) else None


def network_of(engine: Engine) -> EngineNetwork:
    assert engine.address.network is not None
    return engine.address.network


def test_who_has_the_keys_is_answered_over_tcp_and_who_is_here_without(engine: Engine) -> None:
    network = network_of(engine)
    assert network.input.startswith("tcp://127.0.0.1:")
    assert network.input != network.output
    for address in (network.input, network.output):
        assert asked(engine, address, network) == b"hello"
    for address in (engine.address.input, engine.address.output):
        assert asked(engine, address, None) == b"hello"


def test_nobody_else_is_heard_over_tcp(engine: Engine) -> None:
    network = network_of(engine)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    others = [
        None,
        replace(network, client_key=public, client_secret=secret),
        replace(network, server_key=public),
    ]
    for each in others:
        for address in (network.input, network.output):
            assert asked(engine, address, each) is None
    assert engine.heard == []
    assert asked(engine, network.output, network) == b"hello", "others still are"


def test_each_engine_has_keys_of_its_own_and_shows_none(engine: Engine, tmp_path: Path) -> None:
    with ExitStack() as stack:
        other = Engine(stack, tmp_path)
        network = network_of(engine)
        keys = {network.server_key, network.client_key, network.client_secret}
        theirs = network_of(other)
        assert not keys & {theirs.server_key, theirs.client_key, theirs.client_secret}
        assert asked(engine, network.input, theirs) is None
    assert network.client_secret not in repr(engine.address)


def test_a_node_reaches_its_own_engines_by_their_files(engine: Engine, tmp_path: Path) -> None:
    assert engine.address.from_here is None
    elsewhere = EngineAddress.in_folder(tmp_path / "of-another-node")
    assert elsewhere.from_here is None
    assert elsewhere.with_network(network_of(engine)).from_here == network_of(engine)
