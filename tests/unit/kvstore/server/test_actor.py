"""The actor of a node's store, of which several controllers in turn tell it."""

from __future__ import annotations

from typing import Any

from loomserve.kvstore.peers.messages import Member
from loomserve.kvstore.server.actor import StoreActor
from loomserve.platform.base.sqlite import LatestGeneration


class Network:
    """The network, which writes down."""

    def __init__(self) -> None:
        self.told: list[list[Member]] = []

    def set_members(self, members: list[Member]) -> None:
        self.told.append(members)


def test_what_an_earlier_controller_says_of_members_is_not_taken_over() -> None:
    actor: Any = StoreActor.__new__(StoreActor)
    actor._network, actor._controllers = network, _ = Network(), LatestGeneration()
    one, two = ["one"], ["two"]
    for members, generation in ((one, 1), (two, 2), (one, 1), (two, 2)):
        actor.set_members(members, generation)
    assert network.told == [one, two, two]
