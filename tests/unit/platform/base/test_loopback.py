"""Which hosts are this machine alone."""

from __future__ import annotations

import pytest

from loomserve.platform.base.loopback import is_loopback


@pytest.mark.parametrize("host", ["localhost", "LocalHost", "127.0.0.1", "127.9.9.9", "::1"])
def test_these_are_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["", "0.0.0.0", "::", "10.0.0.1", "127.1", "2130706433", "localhost.evil.example",
     "127.0.0.1.evil.example", "[::1]", "localhost:8000"],
)  # fmt: skip
def test_these_are_not(host: str) -> None:
    assert not is_loopback(host)
