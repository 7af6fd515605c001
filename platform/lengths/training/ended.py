"""Requests that ended, on their way to the learner: no API key's outnumber all others'."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class EndedRequests(Generic[T]):
    """Requests that ended since the last round of learning; may be used from any thread.

    Learning from all alike would let one key decide what is predicted for the others.
    """

    def __init__(self, most: int, fewest: int) -> None:
        """
        Args:
            most: requests that wait; beyond them the key with the most loses its oldest.
            fewest: of one key so many are taken in a round whatever the others do.
        """
        self._most = most
        self._fewest = fewest
        self._waiting: dict[str, deque[T]] = {}
        self._keys: set[str] = set()
        self._lock = threading.Lock()

    def add(self, key: str, request: T) -> None:
        """``key``: name of the API key; empty where none is needed."""
        with self._lock:
            self._keys.add(key)
            self._waiting.setdefault(key, deque()).append(request)
            if sum(map(len, self._waiting.values())) > self._most:
                max(self._waiting.values(), key=len).popleft()

    def take(self) -> list[T]:
        """The requests of a round, after which none wait.

        Of a key that has more than all others together, its latest as many. As long as one key
        alone has asked, all.
        """
        with self._lock:
            waiting, self._waiting = self._waiting, {}
            alone = len(self._keys) < 2
        total = sum(map(len, waiting.values()))
        taken: list[T] = []
        for requests in waiting.values():
            others = total - len(requests)
            skipped = 0 if alone else len(requests) - max(others, self._fewest)
            taken += [*requests][max(0, skipped) :]
        return taken
