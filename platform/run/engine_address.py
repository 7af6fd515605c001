"""Where front ends reach an engine's process."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class EngineAddress:
    """The two sockets of an engine's process, as ZMQ writes addresses.

    Attributes:
        input: takes requests.
        output: sends their outputs, and answers ``HELLO``.
    """

    input: str
    output: str

    @classmethod
    def in_folder(cls, folder: Path) -> EngineAddress:
        """Unix sockets in this folder that nobody else has."""
        name = f"core-{secrets.token_hex(4)}"
        return cls(f"ipc://{folder / name}.in", f"ipc://{folder / name}.out")

    def remove(self) -> None:
        """Remove the sockets' files, which a process that was killed leaves behind."""
        for address in (self.input, self.output):
            if address.startswith("ipc://"):
                Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
