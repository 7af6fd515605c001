"""File descriptors: how many this process may have, and how many are left for other things."""

from __future__ import annotations

import resource

_MOST = 2**16
_MOST_SPARE = 256
# Of a gateway without clients; each replica adds a dozen.
_AT_REST = 128


def raise_limit() -> None:
    """Have this process, and those that it starts, get as many as they may, 65,536 at most. Shells
    give 1,024, and some programs visit each number up to the limit, which may be a billion."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if 0 <= soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else soft


def for_clients() -> int:
    """How many there may be when a client is let in, all others of the process included. The rest,
    a fourth or 256, is for engines that come, files, and what libraries open."""
    most = limit()
    return most - min(most // 4, _MOST_SPARE)


def connections_that_fit(wanted: int, ports: int) -> int:
    """Of ``wanted`` connections to each of a gateway's ports, as many as it may have: each takes a
    descriptor, whatever streams by it."""
    return min(wanted, max(0, for_clients() - _AT_REST) // ports)
