"""Where front ends reach an engine's process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path


@dataclass(frozen=True)
class EngineNetwork:
    """The same two sockets for front ends on other nodes, and what they need to be let in.

    Keys are CURVE's, in Z85. Whoever has them may have the engine compute.

    Attributes:
        input: takes requests.
        output: sends their outputs, and answers ``HELLO``.
        server_key: the engine's, by which a front end knows it.
        client_key: front ends', by which the engine knows them.
        client_secret: the private one of the same.
    """

    input: str
    output: str
    server_key: str
    client_key: str
    client_secret: str = field(repr=False)


@dataclass(frozen=True)
class EngineAddress:
    """The two sockets of an engine's process, as ZMQ writes addresses.

    Attributes:
        input: takes requests.
        output: sends their outputs, and answers ``HELLO``.
        network: where other nodes reach them; None: nowhere.
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
