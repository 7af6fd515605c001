"""The admin API's part for the KV store, on a real store behind a real socket."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive

from loomserve.deployments.kvstore.admin import build_kv_router
from loomserve.deployments.kvstore.kv_store import store_plan
from loomserve.kvstore.index.radix import KEY_BYTES
from loomserve.kvstore.server.actor import StoreActor
from loomserve.kvstore.server.client import StoreClient
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.protocol import Commit, Done, Found, Lookup, Reserve, Reserved
from loomserve.platform.cli.kv import render
from loomserve.platform.config import parse
from loomserve.platform.fleet.messages import KvAccess
from loomserve.platform.http.ingress import exception_handlers
from loomserve.platform.state import KvState
from tests.unit.shown_tables import printed, rows

NAMESPACE = bytes(range(16))
CHAIN = bytes(range(64))  # four blocks
BLOCK = {"layers": 2, "layer_bytes": 4096}


@pytest.fixture
def options(tmp_path: Path) -> StoreOptions:
    folder = tmp_path / "store"
    return StoreOptions(
        folder=folder, arena=folder / "arena", memory=64 * 2**20, ssd_folder=None, ssd=0,
        eviction="cost", quotas={},
    )  # fmt: skip


@pytest.fixture
def store(options: StoreOptions) -> Iterator[StoreActor]:
    running = StoreActor(options.model_dump(mode="json"))
    assert running.problem() is None
    yield running
    running.stop()


class Engine:
    """Takes the place of the gateway: records what an engine would be sent."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any], str | None]] = []
        self.status = 200
        chain = {"namespaces": [NAMESPACE.hex()], "keys": CHAIN[: 3 * KEY_BYTES].hex()}
        answer = {
            "usage": {"prompt_tokens": 40},
            "kv_transfer_params": {"loomserve_prompt_chain": chain},
        }
        self.answer = json.dumps(answer).encode()

    async def complete(
        self, path: str, body: dict[str, Any], tenant: str | None, receive: Receive
    ) -> tuple[int, bytes]:
        self.asked.append((path, body, tenant))
        return self.status, self.answer


@pytest.fixture
def engine() -> Engine:
    return Engine()


def api(engine: Engine, address: str | None, *isolated: str) -> TestClient:
    access = None if address is None else KvAccess(address=address)
    app = FastAPI(exception_handlers=exception_handlers)
    app.include_router(build_kv_router(access, lambda: isolated, engine.complete))
    return TestClient(app, raise_server_exceptions=False)


def write(options: StoreOptions, model: str) -> None:
    client = StoreClient(options.address, 2000)
    room = client.ask(Reserve(NAMESPACE, CHAIN, model, **BLOCK), Reserved)
    client.ask(Commit(room.writer, 0.1), Done)
    client.ask(Lookup(NAMESPACE, CHAIN + bytes(16), 4, 1.0, False), Found)
    client.close()


@pytest.mark.usefixtures("store")
def test_what_a_model_holds_is_told_and_flushed(options: StoreOptions, engine: Engine) -> None:
    write(options, "chat")
    client = api(engine, options.address)
    state = KvState.model_validate(client.get("/kv").json())
    assert state.capacity_bytes == 64 * 2**20
    (model,) = state.models
    assert (model.model, model.blocks_in_memory) == ("chat", 4)
    assert (model.hit_blocks, model.missed_blocks) == (4, 1)
    unknown = client.post("/kv/flush", json={"model": "caht"})
    assert unknown.status_code == 404
    assert "it knows: chat" in unknown.json()["error"]["message"]
    assert client.post("/kv/flush", json={"model": "chat"}).json() == {"blocks": 4}
    assert client.post("/kv/flush", json={"model": None}).json() == {"blocks": 0}
    assert client.get("/kv").json()["models"][0]["blocks_in_memory"] == 0


def test_without_a_store_there_is_a_404_that_says_how_to_get_one(engine: Engine) -> None:
    client = api(engine, None)
    for answer in (client.get("/kv"), client.post("/kv/flush", json={})):
        assert answer.status_code == 404
        assert "add a kvstore section" in answer.json()["error"]["message"]


def test_a_store_that_is_away_is_a_503_to_be_tried_again(
    options: StoreOptions, engine: Engine
) -> None:
    client = api(engine, options.address)
    for answer in (client.get("/kv"), client.post("/kv/flush", json={})):
        assert answer.status_code == 503
        assert "requests are served without it" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"] == "5"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ({"messages": [{"role": "system", "content": "Be kind."}]}, "/v1/chat/completions"),
        ({"prompt": "Once upon a time"}, "/v1/completions"),
        ({"prompt": [1, 2, 3]}, "/v1/completions"),
    ],
)
@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.usefixtures("store")
def test_a_pin_is_one_token_of_an_engine_that_tells_the_chain(
    options: StoreOptions, engine: Engine, text: dict[str, Any], path: str, pinned: bool
) -> None:
    write(options, "chat")
    client = api(engine, options.address)
    answer = client.post("/kv/pin", json={"model": "chat", "pinned": pinned, **text})
    assert answer.json() == {"prompt_tokens": 40, "blocks": 3}
    body = {
        "model": "chat",
        **text,
        "max_tokens": 1,
        "kv_transfer_params": {"loomserve_prompt_chain": True},
    }
    assert engine.asked == [(path, body, None)]
    client.post("/kv/flush", json={})
    assert client.get("/kv").json()["models"][0]["blocks_in_memory"] == (3 if pinned else 0)


@pytest.mark.usefixtures("store")
def test_a_pin_waits_for_blocks_that_are_committed_after_the_answer(
    options: StoreOptions, engine: Engine
) -> None:
    late = threading.Timer(0.05, write, (options, "chat"))
    late.start()
    pin = {"model": "chat", "prompt": "a", "pinned": True}
    assert api(engine, options.address).post("/kv/pin", json=pin).json()["blocks"] == 3
    late.join()


def test_with_the_store_away_nothing_is_pinned(options: StoreOptions, engine: Engine) -> None:
    pin = {"model": "chat", "prompt": "a", "pinned": True}
    assert api(engine, options.address).post("/kv/pin", json=pin).json()["blocks"] == 0


@pytest.mark.parametrize(
    "text", [{}, {"prompt": "a", "messages": []}, {"prompt": "a", "colour": "red"}]
)
def test_a_pin_without_exactly_one_text_is_refused(engine: Engine, text: dict[str, Any]) -> None:
    answer = api(engine, "ipc:///nowhere").post(
        "/kv/pin", json={"model": "chat", "pinned": True, **text}
    )
    assert answer.status_code == 400
    assert not engine.asked


def test_what_the_engine_refuses_is_passed_on(engine: Engine) -> None:
    engine.status, engine.answer = 400, b'{"error": {"message": "too long", "param": "prompt"}}'
    answer = api(engine, "ipc:///nowhere").post(
        "/kv/pin", json={"model": "chat", "prompt": "a", "pinned": True}
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "too long"


def test_where_tenants_are_isolated_a_pin_must_say_whose(engine: Engine) -> None:
    client = api(engine, "ipc:///nowhere", "alice", "bob")
    pin = {"model": "chat", "prompt": "a", "pinned": True}
    refused = client.post("/kv/pin", json=pin)
    assert refused.status_code == 400
    assert "alice, bob" in refused.json()["error"]["message"]
    assert client.post("/kv/pin", json={**pin, "api_key": "bob"}).status_code == 200
    assert [tenant for _, _, tenant in engine.asked] == ["bob"]


@pytest.mark.usefixtures("store")
def test_the_table_shows_the_tiers_that_are_there_and_every_model(
    options: StoreOptions, engine: Engine
) -> None:
    write(options, "chat")
    state = KvState.model_validate(api(engine, options.address).get("/kv").json())
    shown = rows(printed(render(state)))
    assert [row[0] for row in shown if row[0] in {"memory", "ssd", "chat"}] == ["memory", "chat"]
    (chat,) = [row for row in shown if row[0] == "chat"]
    assert (chat[1], chat[5], chat[6], chat[7]) == ("4", "4", "1", "80.0")


def test_a_store_takes_over_what_a_killed_one_left_and_removes_it_when_stopped(
    options: StoreOptions, engine: Engine
) -> None:
    program = (
        "import os, sys; from loomserve.kvstore.server.actor import StoreActor; import json;"
        "StoreActor(json.loads(sys.argv[1])); print('up', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program, options.model_dump_json()],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        write(options, "chat")
        child.kill()
    again = StoreActor(options.model_dump(mode="json"))
    assert again.problem() is None
    (model,) = api(engine, options.address).get("/kv").json()["models"]
    assert model["blocks_in_memory"] == 4
    again.stop()
    assert not options.folder.exists()


def test_a_store_in_a_folder_that_others_can_enter_says_so_and_leaves_its_process(
    options: StoreOptions,
) -> None:
    options.folder.mkdir(mode=0o755)
    program = (
        "import json, sys, time; from loomserve.kvstore.server import actor; actor._RETRY_S = 2.0;"
        "print(actor.StoreActor(json.loads(sys.argv[1])).problem(), flush=True); time.sleep(60)"
    )
    child = subprocess.run(
        [sys.executable, "-c", program, options.model_dump_json()], capture_output=True, timeout=90
    )
    assert child.returncode == 1
    assert f"{options.folder} must be a folder of nobody but you" in child.stdout.decode()


@pytest.mark.parametrize(
    ("written", "ssd_folder"),
    [
        ("memory: 64MiB", None),
        ("ssd: 1GiB", "HOME/kv"),
        ("{ssd: 1GiB, ssd_path: blocks}", "BASE/blocks"),
        ("{ssd: 1GiB, ssd_path: /data/blocks}", "/data/blocks"),
    ],
)
def test_a_store_is_planned_as_configured_and_its_socket_has_a_short_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, ssd_folder: str | None
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    section = written if written.startswith("{") else f"{{{written}}}"
    config = parse(
        "devices: [{name: c, kind: cpu, cores: [0]}]\n"
        "models:\n"
        "  - {name: a, source: demo, devices: [c], kvstore_quota: 10MiB}\n"
        "  - {name: b, source: demo, devices: [c]}\n"
        f"kvstore: {section}\n"
    )
    plan = store_plan(config, tmp_path)
    assert plan is not None
    options = plan.here()
    assert options.quotas == {"a": 10 * 2**20}
    assert len(options.address) < 100
    places = {"HOME": str(tmp_path / "home"), "BASE": str(tmp_path)}
    expected = ssd_folder
    for name, place in places.items():
        expected = expected.replace(name, place) if expected else None
    assert (str(options.ssd_folder) if options.ssd_folder else None) == expected
