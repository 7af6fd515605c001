"""Which chains were used last, for who wants to keep some of many."""

from __future__ import annotations

from collections.abc import Iterable

from loomserve.kvstore.index.radix import KEY_BYTES, RadixNode, RadixTree


def hottest_chains(trees: Iterable[RadixTree], most_bytes: int) -> list[tuple[bytes, bytes]]:
    """Namespace and keys of chains in memory, of so many bytes together, the last used first.

    One that another begins with is told with that.
    """
    nodes = [(node, tree) for tree in trees for node in tree.nodes() if node.slots]
    nodes.sort(key=lambda each: each[0].last_used, reverse=True)
    taken: dict[RadixNode, RadixTree] = {}
    for node, tree in nodes:
        new = [each for each in node.path() if each not in taken]
        most_bytes -= sum(len(each.slots) for each in new) * tree.block_bytes
        if most_bytes < 0:
            break
        taken |= dict.fromkeys(new, tree)
    within = {parent for node in taken for parent in node.path() if parent is not node}
    return [
        (tree.namespace, node.chain()[: _in_memory(node)])
        for node, tree in taken.items()
        if node not in within
    ]


def _in_memory(node: RadixNode) -> int | None:
    """Where a node's chain of keys leaves memory; None: not at all."""
    return -(len(node) - len(node.slots)) * KEY_BYTES or None
