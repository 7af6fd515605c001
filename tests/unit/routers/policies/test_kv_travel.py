"""Move the request, move the KV, or compute it again: whichever is quickest."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loomserve.routers.policies.kv_travel import (
    KvLink,
    KvSource,
    PromptKv,
    first_token_time,
    near_best,
    prompt_time,
)

FAST, SLOW = KvLink(0.001, 1e9), KvLink(0.001, 1e6)
SMALL_MODEL, LARGE_MODEL = (23e3, 1 / 700), (128 * 1024, 1 / 20_000)
"""Bytes and seconds a token: 135M parameters on a core, 8B on a GPU."""


def kv(held: dict[str, int], link: KvLink = FAST, token_bytes: float = 1000.0) -> PromptKv:
    nodes = ("a", "b", "c")
    links = {(to, of): link for to in nodes for of in nodes if to != of}
    return PromptKv(1000, token_bytes, held, links)


@pytest.mark.parametrize(
    ("held", "node", "link", "expected"),
    [
        ({}, "a", FAST, KvSource(1.0, None)),
        ({"a": 600}, "a", FAST, KvSource(0.4, None)),
        ({"b": 600}, "a", FAST, KvSource(0.4016, "b")),
        ({"a": 600, "b": 600}, "a", FAST, KvSource(0.4, None)),
        ({"a": 200, "b": 600}, "a", FAST, KvSource(0.4014, "b")),
        ({"b": 600, "c": 900}, "a", FAST, KvSource(0.1019, "c")),
        ({"b": 2000}, "a", FAST, KvSource(0.002, "b")),
        ({"b": 600}, "a", SLOW, KvSource(1.0, None)),
        ({"b": 600}, "elsewhere", FAST, KvSource(1.0, None)),
    ],
)
def test_the_quickest_way_to_a_prompts_kv(
    held: dict[str, int], node: str, link: KvLink, expected: KvSource
) -> None:
    found = prompt_time(kv(held, link), node, 0.001)
    assert found.seconds == pytest.approx(expected.seconds)
    assert found.fetched_from == expected.fetched_from


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
    asked = kv({"b": 1000}, KvLink(0.0, bytes_per_s), token_bytes)
    assert (prompt_time(asked, "a", s_per_token).fetched_from == "b") is fetches


def test_waiting_counts_and_a_queue_that_is_done_does_not() -> None:
    asked = kv({"b": 600})
    assert first_token_time(asked, "a", 0.001, 0.5, 0.2) == KvSource(pytest.approx(1.1016), "b")
    assert first_token_time(asked, "a", 0.001, 0.5, -0.2).seconds == pytest.approx(0.9016)


def test_those_within_a_tenth_of_the_best_are_equal() -> None:
    assert near_best({"a": 1.0, "b": 1.09, "c": 1.2}) == ["a", "b"]
    assert near_best({}) == []


@given(
    held=st.dictionaries(st.sampled_from("abc"), st.integers(0, 1500)),
    rate=st.floats(1e3, 1e12),
    s_per_token=st.floats(1e-6, 1),
)
def test_it_is_never_slower_than_computing_and_never_negative(
    held: dict[str, int], rate: float, s_per_token: float
) -> None:
    found = prompt_time(kv(held, KvLink(0.001, rate)), "a", s_per_token)
    assert 0 <= found.seconds <= (1000 - min(held.get("a", 0), 1000)) * s_per_token
    assert found.fetched_from != "a"
