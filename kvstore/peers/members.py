"""Which stores there are."""

from __future__ import annotations

from typing import NamedTuple

from loomserve.kvstore.transport.protocol import PeerAddress


class Member(NamedTuple):
    """A node's store: where it listens, and since which start."""

    node: str
    address: PeerAddress
    epoch: int
