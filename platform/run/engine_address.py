"""Where clients reach an engine's process, and on which node a process is."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class EngineNetwork:
    """The sockets of an :class:`EngineAddress` for other nodes, and what lets their clients in.

    Keys are CURVE's, in Z85: of the engine, by which clients know it, and of clients, by which it
    knows them. Their holder may have the engine compute.
    """

    input: str
    output: str
    server_key: str
    client_key: str
    client_secret: str = field(repr=False)


@dataclass(frozen=True)
class EngineAddress:
    """The two sockets of an engine's process, as ZMQ writes addresses.

    ``input`` takes requests; ``output`` sends their outputs, and answers ``HELLO``. ``network`` is
    where other nodes reach them; None: nowhere.
    """

    input: str
    output: str
    network: EngineNetwork | None = None

    @classmethod
    def in_folder(cls, folder: Path) -> EngineAddress:
        """Unix sockets in this folder that nobody else has."""
        name = f"core-{secrets.token_hex(4)}"
        return cls(f"ipc://{folder / name}.in", f"ipc://{folder / name}.out")

    def with_network(self, network: EngineNetwork | None) -> EngineAddress:
        return replace(self, network=network)

    @property
    def from_here(self) -> EngineNetwork | None:
        """How this node reaches it: over a network, or None: by its sockets' files."""
        # Names of sockets are of one engine on whatever node.
        here = Path(self.output.removeprefix("ipc://")).exists()
        return None if here else self.network

    def remove(self) -> None:
        """Remove the sockets' files, which a process that was killed leaves behind."""
        for address in (self.input, self.output):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


def node_of(address: str) -> str:
    """The node at which an address, ``NAME.NODE``, is."""
    return address.partition(".")[2].partition(":")[0]
