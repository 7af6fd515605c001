"""When a prompt could be answered where, if its KV may be fetched from where it is.

For a node and what it has of a prompt: the rest is computed there; or the node that has most sends
what it has more, and what nobody has is computed. The less of the two counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class KvLink:
    """What fetches between two nodes take, as measured: seconds to begin, then bytes a second."""

    setup_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class PromptKv:
    """What nodes have of one prompt's KV.

    Attributes:
        prompt_tokens: Of the whole prompt.
        token_bytes: KV of a token.
        held: Tokens of the longest prefix that a node has, by node; a node that is not named has
            none.
        links: To a node, from a node.
    """

    prompt_tokens: int
    token_bytes: float
    held: Mapping[str, int]
    links: Mapping[tuple[str, str], KvLink]


@dataclass(frozen=True)
class KvSource:
    """Seconds until a prompt is computed on a node, and the node that sends some of it, if any."""

    seconds: float
    fetched_from: str | None


def prompt_time(kv: PromptKv, node: str, s_per_token: float) -> KvSource:
    """The quickest way to have a prompt's KV on a node that computes a token in so many seconds.

    Ties go to computing, then to the node that has more, then to the first by name.
    """
    here = min(kv.held.get(node, 0), kv.prompt_tokens)
    best = KvSource((kv.prompt_tokens - here) * s_per_token, None)
    for holder in sorted(kv.held, key=lambda name: (-kv.held[name], name)):
        link = kv.links.get((node, holder))
        there = min(kv.held[holder], kv.prompt_tokens)
        if holder == node or link is None or there <= here:
            continue
        fetched_s = link.setup_s + (there - here) * kv.token_bytes / link.bytes_per_s
        seconds = fetched_s + (kv.prompt_tokens - there) * s_per_token
        if seconds < best.seconds:
            best = KvSource(seconds, holder)
    return best


def first_token_time(
    kv: PromptKv, node: str, s_per_token: float, wait_s: float, queue_s: float
) -> KvSource:
    """Predicted seconds to a first token of a replica on a node.

    Args:
        kv: what nodes have of the prompt.
        node: the replica's.
        s_per_token: seconds in which it computes a token of a prompt.
        wait_s: until it takes the request up.
        queue_s: of prompts that this process has sent it since it told its load; less than 0: none.
    """
    prompt = prompt_time(kv, node, s_per_token)
    return KvSource(wait_s + max(queue_s, 0.0) + prompt.seconds, prompt.fetched_from)


def near_best(times: Mapping[str, float], within: float = 0.1) -> list[str]:
    """Of replicas' times, those within a share of the least, between which load decides."""
    least = min(times.values(), default=math.inf)
    return [replica for replica, seconds in times.items() if seconds <= least * (1 + within)]
