"""What holds of every index and its trees; each check visits all nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from loomserve.kvstore.index.directory import Directory
from loomserve.kvstore.index.eviction import EvictionCandidate, Policy, Refetch
from loomserve.kvstore.index.index import Index
from loomserve.kvstore.index.journal import Tier
from loomserve.kvstore.index.radix import KEY_BYTES, NOWHERE, RadixNode, RadixTree


def check_tree(tree: RadixTree) -> None:
    """Fail if an invariant of :mod:`loomserve.kvstore.index.radix` is broken."""
    located: dict[int, RadixNode] = {}
    for node in tree.nodes():
        assert len(node.keys) == len(node) * KEY_BYTES > 0
        assert not node.detached
        assert node.parent is not None
        assert node.parent.children[node.keys[:KEY_BYTES]] is node
        assert len(node.slots) <= len(node)
        assert NOWHERE not in node.locations[len(node.slots) :]
        in_memory = len(node.slots) == len(node)
        assert in_memory or not any(child.slots for child in node.children.values())
        assert in_memory or not node.locks
        assert node.below == sum(bool(child.slots) for child in node.children.values())
        on_ssd = [location for location in node.locations if location != NOWHERE]
        assert located.keys().isdisjoint(on_ssd)
        located.update(dict.fromkeys(on_ssd, node))
    assert located == tree.by_location
    assert tree.in_memory == sum(len(node.slots) for node in tree.nodes())


def check_index(index: Index) -> None:
    """Fail if locks, slots or locations do not fit together."""
    pinned = [last for known in index._namespaces.values() for last in known.pins.lasts()]
    assert not any(last.detached for last in pinned)
    locks = Counter(node for last in [*index.leases.lasts(), *pinned] for node in last.path())
    # Nodes that only a lease still refers to count too.
    nodes = set(locks)
    for tree in index.trees():
        check_tree(tree)
        nodes.update(tree.nodes())
    assert all(node.locks == locks[node] for node in nodes)
    slots = [slot for node in nodes for slot in node.slots]
    assert len(slots) == len(set(slots))
    located = [at for tree in index.trees() for at in tree.by_location]
    assert len(located) == len(set(located))


def order_by_rule(
    trees: Iterable[RadixTree], policy: Policy, refetch: Refetch | None = None
) -> Iterator[RadixNode]:
    """The nodes in the order in which they are to leave memory, each time among all of them."""
    nodes = {node: tree for tree in trees for node in tree.nodes() if node.slots}

    def worth(node: RadixNode) -> tuple[float, float]:
        tree, recompute_s = nodes[node], node.recompute_s
        end = len(node.slots) * KEY_BYTES
        if refetch is not None:
            fetch_s = refetch(tree.namespace, node.keys[end - KEY_BYTES : end], tree.block_bytes)
            recompute_s = recompute_s if fetch_s is None else min(recompute_s, fetch_s)
        of = EvictionCandidate(recompute_s, tree.block_bytes, node.uses, node.last_used, node.floor)
        return policy(of), node.last_used

    while ends := [
        node
        for node in nodes
        if not node.locks and not any(child in nodes for child in node.children.values())
    ]:
        least = min(ends, key=worth)
        yield least
        del nodes[least]


def blocks_of(directory: Directory, node: str) -> dict[tuple[bytes, bytes], Tier]:
    """All entries of a node, by namespace and key."""
    known = directory._nodes.get(node)
    return {
        (namespace, key): tier
        for namespace, blocks in (known.blocks if known is not None else {}).items()
        for key, tier in blocks.items()
    }
