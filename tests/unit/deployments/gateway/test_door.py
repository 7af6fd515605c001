"""Whatever a client sends, the next request on each connection is read from its own begin, and is
answered in its own key's name."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from loomserve.platform.fleet.messages import INTERNAL_TOKEN_HEADER, OWNER_HEADER
from loomserve.platform.http.protocol import INTERNAL
from loomserve.platform.http.server import GuardedApp
from tests.unit.deployments.gateway.door import OWNERS, SECRETS, TOKEN, Client, Door, open_door
from tests.unit.platform.http.raw import serving
from tests.unit.platform.http.test_slow_clients import hello

pytestmark = pytest.mark.anyio
METHODS = ("GET", "HEAD", "OPTIONS", "TRACE", "POST", "PUT", "PATCH", "DELETE")
BODYLESS = METHODS[:4]
# A body that is a request, if it is taken for one.
SMUGGLED = (
    f"GET /v1/files HTTP/1.1\r\nHost: x\r\n{OWNER_HEADER}: bob\r\n"
    f"{INTERNAL_TOKEN_HEADER}: {TOKEN}\r\nx: "
).encode()
FRAMINGS = {
    "none": b"\r\n",
    "length": b"Content-Length: %d\r\n\r\n" % len(SMUGGLED) + SMUGGLED,
    "chunked": b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
    % (len(SMUGGLED), SMUGGLED),
}
TARGETS = {
    "/v1/files": "alice",
    "/v1/batches": "alice",
    "/v1/chat/completions": "alice",
    "/admin/v1/state": "admin",
    "/nothing": "admin",
}


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    # As in Serve's replicas.
    return "asyncio", {"use_uvloop": True}


async def names_shown_to(door: Door, owner: str) -> set[str]:
    async with door.client() as client:
        return (await client.ask("GET", "/v1/files", owner)).file_names


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_after_any_request_others_are_answered_as_themselves(
    tmp_path: Path, framing: str
) -> None:
    async with open_door(tmp_path / "b") as door:
        # A connection is there to be spoilt.
        assert await names_shown_to(door, "alice") == {"alice"}
        for method in METHODS:
            for target, who in TARGETS.items():
                case = f"{method} {target}, {framing}"
                async with door.client() as client:
                    answer = await client.ask(method, target, who, FRAMINGS[framing])
                    if framing != "none" and method in BODYLESS:
                        assert (answer.status, answer.closes) == (400, True), case
                    if answer.closes:
                        assert await client.is_at_end(), case
                    else:
                        assert (await client.ask("GET", "/v1/files", "alice")).file_names == {
                            "alice"
                        }, case
                assert await names_shown_to(door, "bob") == {"bob"}, case
                assert door.unread == 0, case
        assert await names_shown_to(door, "alice") == {"alice"}


Kind = Callable[[Client, str, Door], Awaitable[None]]


async def lists(client: Client, owner: str, door: Door) -> None:
    assert (await client.ask("GET", "/v1/files", owner)).file_names == {owner}


async def reads(client: Client, owner: str, door: Door) -> None:
    target = f"/v1/files/{door.files[owner]}/content"
    answer = await client.ask("GET", target, owner, b"Range: bytes=8-\r\n\r\n")
    assert (answer.status, answer.body) == (206, f"{owner}'s".encode())


async def reads_anothers(client: Client, owner: str, door: Door) -> None:
    (other,) = set(OWNERS) - {owner}
    answer = await client.ask("GET", f"/v1/files/{door.files[other]}", owner)
    assert answer.status == 404


async def only_asks_for_the_head(client: Client, owner: str, door: Door) -> None:
    target = f"/v1/files/{door.files[owner]}/content"
    assert (await client.ask("HEAD", target, owner)).status == 200
    await lists(client, owner, door)


async def smuggles(client: Client, owner: str, door: Door) -> None:
    answer = await client.ask("GET", "/v1/files", owner, FRAMINGS["length"])
    assert (answer.status, answer.closes) == (400, True)


async def asks_for_a_bad_batch(client: Client, owner: str, door: Door) -> None:
    answer = await client.ask("POST", "/v1/batches", owner, FRAMINGS["chunked"])
    assert answer.status == 400
    await lists(client, owner, door)


async def uploads_what_is_no_form(client: Client, owner: str, door: Door) -> None:
    assert (await client.ask("POST", "/v1/files", owner, FRAMINGS["length"])).status == 400


async def goes_within_an_upload(client: Client, owner: str, door: Door) -> None:
    kind = b"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: 9999\r\n\r\n--b\r\n"
    client.writer.write(
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        + SECRETS[owner].encode()
        + b"\r\n"
        + kind
    )
    await asyncio.sleep(0)


KINDS: tuple[Kind, ...] = (
    lists,
    reads,
    reads_anothers,
    only_asks_for_the_head,
    smuggles,
    asks_for_a_bad_batch,
    uploads_what_is_no_form,
    goes_within_an_upload,
)


@pytest.mark.parametrize("pairs", [200, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_two_keys_on_one_connection_never_get_each_others_answers(
    tmp_path: Path, pairs: int
) -> None:
    chance = random.Random(pairs)

    async def asks(owner: str, kind: Kind) -> None:
        async with door.client() as client:
            await kind(client, owner, door)

    async with open_door(tmp_path / "b") as door:
        for _ in range(pairs):
            one, other = chance.sample(OWNERS, 2)
            await asyncio.gather(asks(one, chance.choice(KINDS)), asks(other, chance.choice(KINDS)))
        assert door.unread == 0


HANDSHAKES = (
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
)


@pytest.mark.parametrize("handshake", HANDSHAKES)
async def test_no_other_protocol_goes_past_a_token(tmp_path: Path, handshake: bytes) -> None:
    raw = b"GET /v1/files HTTP/1.1\r\nHost: localhost\r\n" + handshake + b"\r\n"
    async with open_door(tmp_path / "b") as door:
        assert await door.gateway.statuses(raw) == [401]
        assert await door.lane.statuses(raw) == [403]
        async with door.client() as client:
            answer = await client.ask("GET", "/v1/files", "alice", handshake + b"\r\n")
            assert (answer.file_names, answer.closes) == ({"alice"}, True)
    async with serving(GuardedApp(hello, TOKEN), INTERNAL) as engine:
        assert await engine.statuses(raw) == [403]
