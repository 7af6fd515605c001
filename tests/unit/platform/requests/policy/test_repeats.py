"""Counted repeats are counted, times those that they are in."""

from __future__ import annotations

import time

import pytest

from loomserve.platform.requests.policy.grammars import repeats


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("abc", 0),
        ("a{3}", 3),
        ("a{2,5}b{1,}", 6),
        ("a{,7}", 7),
        ("[a-z{9}]{4}", 4),
        (r"\{9}{2}", 2),
        ("(ab){6}", 6),
        ("(a{5}b{2}){10}", 70),
        ("((a{3}){3}){3}", 27),
        ("a{3}{3}", 9),
        ("(((", 0),
        (")){4}", 4),
        ("a{x}", 0),
        ("a{99999}", 1001),
        ("(a{30}b){40}", 1001),
    ],
)
def test_repeats(pattern: str, count: int) -> None:
    assert repeats(pattern, 1000) == count


@pytest.mark.parametrize("part", ["(", "[", "{", "\\", "[a]", "(a{1})", "a{1,2}", "{1", "[^]"])
def test_a_long_expression_is_read_soon(part: str) -> None:
    began = time.process_time()
    repeats(part * (8192 // len(part)), 1000)
    assert time.process_time() - began < 0.5
