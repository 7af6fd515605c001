"""Move the request, move the KV, or compute it again: whichever is quickest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.policies.kv_travel import KvLinks, tokens_to_compute
from loomserve.routers.policy import KvLink

FAST, SLOW = KvLink(0.001, 1e9), KvLink(0.001, 1e6)
NODES = ("a", "b", "c")
PROMPT = 1000
SMALL_MODEL, LARGE_MODEL = (23e3, 1 / 700), (128 * 1024, 1 / 20_000)
"""Bytes and seconds a token: 135M parameters on a core, 8B on a GPU."""


def missing(
    has: list[tuple[str, int]],
    links: dict[tuple[str, str], KvLink],
    *,
    token_bytes: float = 1000.0,
    s_per_token: float = 0.001,
) -> list[float]:
    """Of replicas, each on its node with so many tokens."""
    found = tokens_to_compute(
        np.array([tokens for _, tokens in has]),
        np.array([NODES.index(node) for node, _ in has]),
        PROMPT,
        s_per_token=np.full(len(has), s_per_token),
        token_bytes=token_bytes,
        links=KvLinks.between(NODES, links),
    )
    return list(map(float, found))


def all_alike(link: KvLink) -> dict[tuple[str, str], KvLink]:
    return {(to, of): link for to in NODES for of in NODES if to != of}


@pytest.mark.parametrize(
    ("has", "link", "expected"),
    [
        ([("a", 0), ("b", 0)], FAST, [1000, 1000]),
        ([("a", 600), ("b", 0)], FAST, [400, 401.6]),
        ([("a", 600), ("b", 600)], FAST, [400, 400]),
        ([("a", 200), ("b", 600)], FAST, [401.4, 400]),
        ([("b", 600), ("c", 900), ("a", 0)], FAST, [101.3, 100, 101.9]),
        ([("b", 2000), ("a", 0)], FAST, [0, 2]),
        ([("a", 0), ("b", 600)], SLOW, [1000, 400]),
        ([("a", 0), ("a", 600), ("b", 0)], SLOW, [400, 400, 1000]),
    ],
    ids=[
        "nobody has any", "it is fetched", "both have it", "what is missing is fetched",
        "who has most sends it", "no more than the prompt", "a slow link",
        "a node's store is shared",
    ],
)  # fmt: skip
def test_what_a_prompt_takes(
    has: list[tuple[str, int]], link: KvLink, expected: list[float]
) -> None:
    assert missing(has, all_alike(link)) == pytest.approx(expected)


def test_of_two_that_have_as_much_the_better_link_sends() -> None:
    links = {("a", "b"): SLOW, ("a", "c"): FAST}
    assert missing([("a", 0), ("b", 600), ("c", 600)], links)[0] == pytest.approx(401.6)


def test_over_a_link_that_nobody_has_measured_nothing_is_fetched() -> None:
    assert missing([("a", 0), ("b", 600)], {}) == [1000, 400]


def test_before_a_replica_has_said_how_fast_it_is_nothing_is_fetched() -> None:
    found = missing([("a", 0), ("b", 600)], all_alike(FAST), s_per_token=0.0)
    assert found == [1000, 400]


@pytest.mark.parametrize(
    ("model", "bytes_per_s", "fetches"),
    [
        (SMALL_MODEL, 15e6, False),
        (SMALL_MODEL, 20e6, True),
        (LARGE_MODEL, 1.5e9, False),
        (LARGE_MODEL, 10e9, True),
    ],
)
def test_whether_a_fetch_pays_is_a_matter_of_model_and_link(
    model: tuple[float, float], bytes_per_s: float, fetches: bool
) -> None:
    token_bytes, s_per_token = model
    found = missing(
        [("a", 0), ("b", 1000)],
        all_alike(KvLink(0.0, bytes_per_s)),
        token_bytes=token_bytes,
        s_per_token=s_per_token,
    )
    assert (found[0] < PROMPT) is fetches


@given(
    has=st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 1500)), min_size=1, max_size=8),
    rate=st.floats(1e3, 1e12),
    setup_s=st.floats(0, 1),
    s_per_token=st.floats(1e-6, 1),
)
def test_it_is_the_least_of_computing_and_fetching_from_who_has_most(
    has: list[tuple[str, int]], rate: float, setup_s: float, s_per_token: float
) -> None:
    found = missing(has, all_alike(KvLink(setup_s, rate)), s_per_token=s_per_token)
    held = dict.fromkeys(NODES, 0)
    for node, tokens in has:
        held[node] = max(held[node], min(tokens, PROMPT))
    most = max(held.values())
    for (node, _), tokens in zip(has, found, strict=True):
        ways = [PROMPT - held[node]]
        if held[node] < most:
            fetch_s = setup_s + (most - held[node]) * 1000.0 / rate
            ways.append(fetch_s / s_per_token + PROMPT - most)
        assert tokens == pytest.approx(min(ways))
