"""Queries of death: requests that end each engine that gets them, remembered to be refused."""

from __future__ import annotations

from collections.abc import Callable


class QueriesOfDeath:
    """Replicas whose engines ended while they had a request, known by a digest of its bytes.

    Each request is remembered for ``remember_s`` seconds after the last engine that it ended; the
    latest ``most`` are kept.
    """

    def __init__(
        self, clock: Callable[[], float], *, remember_s: float = 60.0, most: int = 4096
    ) -> None:
        self._clock = clock
        self._remember_s = remember_s
        self._most = most
        self._ended: dict[bytes, tuple[float, frozenset[str]]] = {}

    def __bool__(self) -> bool:
        return bool(self._ended)

    def ended(self, digest: bytes, replica_id: str) -> None:
        replicas = self.replicas(digest) | {replica_id}
        self._ended.pop(digest, None)
        self._ended[digest] = self._clock() + self._remember_s, replicas
        if len(self._ended) > self._most:
            del self._ended[next(iter(self._ended))]

    def answered(self, digest: bytes) -> None:
        """Forget a request: an engine has answered it, so none ended because of it."""
        self._ended.pop(digest, None)

    def replicas(self, digest: bytes) -> frozenset[str]:
        """Ids of the replicas that ended lately while they had the request."""
        now = self._clock()
        # They stand in the order in which they are forgotten.
        while self._ended and next(iter(self._ended.values()))[0] <= now:
            del self._ended[next(iter(self._ended))]
        return self._ended[digest][1] if digest in self._ended else frozenset()
