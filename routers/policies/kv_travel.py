"""What of a prompt is to be computed where, if its KV may be fetched from where it is.

Each node has a KV store, and so has what any of its replicas was sent. A node computes what it does
not have of a prompt; or the node that has most sends what it has more. The less of the two counts,
as tokens that the replica could compute in that time. What a replica was not sent, it loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from loomserve.routers.base import Floats, Ints
from loomserve.routers.policy import KvLink


@dataclass(frozen=True)
class KvLinks:
    """All links between some nodes, by the places of the nodes: ``[to, from]``. A link that nobody
    has measured takes for ever."""

    setup_s: Floats
    s_per_byte: Floats

    @classmethod
    def between(cls, nodes: Sequence[str], measured: Mapping[tuple[str, str], KvLink]) -> KvLinks:
        """``measured``: to a node, from a node."""
        setup_s = np.full((len(nodes), len(nodes)), np.inf)
        s_per_byte = np.full((len(nodes), len(nodes)), np.inf)
        place = {name: at for at, name in enumerate(nodes)}
        for (to, of), link in measured.items():
            if to in place and of in place:
                setup_s[place[to], place[of]] = link.setup_s
                s_per_byte[place[to], place[of]] = 1 / link.bytes_per_s
        return cls(setup_s, s_per_byte)


def tokens_to_compute(
    has: Ints,
    nodes: Ints,
    prompt_tokens: int,
    *,
    s_per_token: Floats,
    token_bytes: float,
    links: KvLinks,
    load_share: float = 0.0,
) -> Floats:
    """What each candidate would compute of a prompt, or fetch in the time of so many tokens.

    Args:
        has: tokens at the prompt's beginning that each candidate was sent.
        nodes: the place of each candidate's node.
        s_per_token: seconds in which each computes a token; 0: not known, so nothing is fetched.
        load_share: of the time to compute a token, what it takes to load it from the node's store.
    """
    held = np.zeros(len(links.setup_s), np.int64)
    np.maximum.at(held, nodes, np.minimum(has, prompt_tokens))
    most = int(held.max())
    own = held[nodes]
    computed = (prompt_tokens - own).astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        # Of those that have as much, the one that sends it soonest.
        holders = np.flatnonzero(held == most)
        fetch_s = np.min(
            links.setup_s[:, holders]
            + (most - held)[:, None] * token_bytes * links.s_per_byte[:, holders],
            axis=1,
        )[nodes]
        fetched = fetch_s / s_per_token + (prompt_tokens - most)
    fetches = (own < most) & np.isfinite(fetched) & (fetched < computed)
    loaded = load_share * (np.where(fetches, most, own) - np.minimum(has, own))
    tokens: NDArray[np.float64] = np.where(fetches, fetched, computed) + loaded
    return tokens
