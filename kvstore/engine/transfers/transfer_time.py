"""How long copies of KV blocks took, and how much of that computation hid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Copied(NamedTuple):
    """Bytes copied since the start, and the seconds that these copies took."""

    size: int = 0
    busy_s: float = 0.0


class Saved(NamedTuple):
    """Blocks saved since the start, and what they cost the thread that saves: seconds of a core."""

    blocks: int = 0
    core_s: float = 0.0


@dataclass
class TransferTime:
    """Copies of a transfer thread since the start; the forward pass waited ``waited_s`` for them.

    ``copied`` is one object because the engine's thread reads it while the transfer thread copies:
    bytes without their seconds would be a transfer that took no time.
    """

    copied: Copied = field(default_factory=Copied)
    waited_s: float = 0.0
    saved: Saved = field(default_factory=Saved)

    def add(self, size: int, busy_s: float) -> None:
        """Count a copy; called by the transfer thread alone."""
        self.copied = Copied(self.copied.size + size, self.copied.busy_s + busy_s)

    def add_saved(self, blocks: int, core_s: float) -> None:
        """Count a step's saves, asking the store included; called by the transfer thread alone."""
        self.saved = Saved(self.saved.blocks + blocks, self.saved.core_s + core_s)

    @property
    def hidden_share(self) -> float:
        """Share of the transfers' time that was beside computation, in [0, 1]."""
        busy_s = self.copied.busy_s
        return 1.0 - min(1.0, self.waited_s / busy_s) if busy_s else 1.0
