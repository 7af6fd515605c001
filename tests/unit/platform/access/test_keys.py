from __future__ import annotations

import hashlib
import hmac
import re
from typing import Any

import pytest

from loomserve.platform.access.keys import KeyRing, hash_key, new_key
from loomserve.platform.base.errors import Unauthorized
from loomserve.platform.config import ApiKey


def _ring(*keys: str) -> KeyRing:
    return KeyRing(tuple(ApiKey(name=f"user{i}", hash=hash_key(key)) for i, key in enumerate(keys)))


def test_a_new_key_carries_256_random_bits_and_its_hash() -> None:
    key, digest = new_key()
    assert re.fullmatch(r"lsk-[A-Za-z0-9_-]{43}", key)
    assert digest == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert ApiKey(name="user", hash=digest).hash == digest


def test_new_keys_differ() -> None:
    assert len({new_key()[0] for _ in range(100)}) == 100


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_key_is_recognised_wherever_it_stands_in_the_ring(index: int) -> None:
    keys = [new_key()[0] for _ in range(3)]
    identified = _ring(*keys).identify(keys[index])
    assert identified is not None
    assert identified.name == f"user{index}"


@pytest.mark.parametrize("presented", [None, "", "anything"])
def test_without_keys_anyone_may_enter(presented: str | None) -> None:
    assert KeyRing(()).identify(presented) is None


@pytest.mark.parametrize("presented", [None, ""])
def test_a_missing_key_is_told_apart_and_says_how_to_send_one(presented: str | None) -> None:
    with pytest.raises(Unauthorized, match=r"No API key was given.*Authorization: Bearer"):
        _ring("lsk-right").identify(presented)


@pytest.mark.parametrize("presented", ["lsk-wrong", "lsk-right ", "LSK-RIGHT", "ключ", "lsk-righ"])
def test_a_wrong_key_is_refused_and_never_echoed(presented: str) -> None:
    with pytest.raises(Unauthorized, match="This API key is not known") as refusal:
        _ring("lsk-right").identify(presented)
    assert presented not in str(refusal.value.body())


def test_the_hash_does_not_open_the_door() -> None:
    with pytest.raises(Unauthorized):
        _ring("lsk-right").identify(hash_key("lsk-right"))


def test_the_admin_token_is_a_ring_that_names_itself() -> None:
    ring = KeyRing((ApiKey(name="admin", hash=hash_key("token")),), what="admin token")
    assert ring.identify("token") is not None
    with pytest.raises(Unauthorized, match="admin token"):
        ring.identify("other")


@pytest.mark.parametrize("presented", ["first", "second", "third"])
def test_every_key_is_compared_in_constant_time_whichever_matches(
    monkeypatch: pytest.MonkeyPatch, presented: str
) -> None:
    compared: list[Any] = []
    compare = hmac.compare_digest

    def counting(left: str, right: str) -> bool:
        compared.append(right)
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", counting)
    _ring("first", "second", "third").identify(presented)
    assert compared == [hash_key(key) for key in ("first", "second", "third")]
