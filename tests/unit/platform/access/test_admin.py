"""What operators see of the API keys."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
from fastapi import FastAPI

from loomserve.platform.access.admin import build_keys_router
from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.config import Server


def told(server: Server) -> str:
    api = FastAPI()
    api.include_router(build_keys_router(LiveKeys(server), asked_for=server.asks_for_keys))

    async def answer() -> httpx.Response:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get("/keys")

    return asyncio.run(answer()).raise_for_status().text


def state(server: dict[str, Any]) -> Any:
    return httpx.Response(200, text=told(Server.model_validate(server))).json()


def test_keys_are_told_with_their_limits() -> None:
    alice = {"name": "alice", "hash": hash_key("lsk-a"), "models": ["chat"], "max_concurrent": 3}
    bob = {"name": "bob", "hash": hash_key("lsk-b"), "expires_at": "2027-01-31T00:00:00Z"}
    answer = state({"api_keys": [alice, bob]})
    assert (answer["asked_for"], answer["problem"]) == (True, None)
    first, second = answer["keys"]
    assert (first["name"], first["models"], first["max_concurrent"]) == ("alice", ["chat"], 3)
    assert (first["expires_at"], first["tokens_per_day"]) == (None, None)
    assert (second["name"], second["expires_at"]) == ("bob", "2027-01-31T00:00:00Z")


def test_no_hash_of_a_key_is_told() -> None:
    hashes = [hash_key("lsk-a"), hash_key("lsk-b")]
    key = {"name": "alice", "hash": hashes[0], "next_hash": hashes[1]}
    text = told(Server.model_validate({"api_keys": [key]}))
    assert "alice" in text
    assert not any(each.removeprefix("sha256:") in text for each in hashes)


def test_without_keys_it_says_so() -> None:
    assert state({}) == {"asked_for": False, "problem": None, "keys": []}


def test_what_is_wrong_with_the_file_is_told(tmp_path: Any) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: 3")
    path.chmod(0o600)
    answer = state({"api_keys_file": str(path)})
    assert answer["asked_for"] is True
    assert "keys.yaml" in answer["problem"]
