"""The beginnings of prompts that a simulated engine has computed, block by block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import takewhile


class PrefixCache:
    """Keys of as many blocks as the engine's memory has, the least recently used forgotten first.

    Blocks that requests hold are not taken from it: what it finds is the most that an engine would.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        """``blocks`` 0: it remembers nothing."""
        self._blocks, self._block_tokens = blocks, block_tokens
        self._known: OrderedDict[int, None] = OrderedDict()

    def keys(self, tokens: Sequence[int], own: object) -> list[int]:
        """Keys of a prompt's whole blocks; prompts that differ in ``own`` have none in common."""
        key, keys, size = hash(own), [], self._block_tokens
        for begin in range(0, len(tokens) - len(tokens) % size, size):
            key = hash((key, *tokens[begin : begin + size]))
            keys.append(key)
        return keys

    def cached(self, keys: Sequence[int]) -> int:
        """Tokens of these blocks that need not be computed, from the first on."""
        found = list(takewhile(self._known.__contains__, keys))
        self.add(found)
        return len(found) * self._block_tokens

    def add(self, keys: Sequence[int]) -> None:
        for key in keys:
            self._known[key] = None
            self._known.move_to_end(key)
        while len(self._known) > self._blocks:
            self._known.popitem(last=False)

    def clear(self) -> None:
        self._known.clear()
