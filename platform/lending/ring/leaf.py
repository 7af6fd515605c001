"""The task ring between CPUs."""

from __future__ import annotations

from pathlib import Path

from loomserve.platform.lending.ring.attention_server import AttentionServer
from loomserve.platform.lending.ring.borrower import Borrower
from loomserve.platform.lending.ring.ring import Ring


class RingLeaf:
    """A :class:`~loomserve.platform.lending.leaf.Leaf`; see
    :class:`~loomserve.platform.lending.ring.attention_server.AttentionServer` for ``split_kv``."""

    computes_layers = True
    polls = True

    def __init__(self, *, split_kv: bool) -> None:
        self._split_kv = split_kv

    def borrower(self, path: Path, patience_s: float) -> Borrower:
        return Borrower(Ring.attach(path))

    def server(self) -> AttentionServer:
        return AttentionServer(split_kv=self._split_kv)
