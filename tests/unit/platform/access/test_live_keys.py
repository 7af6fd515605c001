from __future__ import annotations

import asyncio
import logging
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys, read_keys
from loomserve.platform.base.errors import ConfigError, Forbidden, Unauthorized, Unavailable
from loomserve.platform.base.files import replace_private
from loomserve.platform.config import Server

NEW_YEAR_S = 1_798_761_600.0
NEW_YEAR = "2027-01-01T00:00:00Z"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.yaml"


def entry(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "hash": hash_key(f"lsk-{name}"), **more}


def write(file: Path, *entries: dict[str, Any]) -> None:
    replace_private(file, yaml.safe_dump({"api_keys": list(entries)}))


def server(file: Path, *entries: dict[str, Any]) -> Server:
    return Server.model_validate({"api_keys": list(entries), "api_keys_file": str(file)})


def opens(keys: LiveKeys, key: str | None) -> str | None:
    """The name of the key, or why it is refused."""
    try:
        found = keys.ring.identify(key)
    except Unauthorized as error:
        return error.code
    return found.name if found else None


def test_a_key_comes_changes_and_goes_with_the_file(file: Path) -> None:
    write(file, entry("alice"))
    keys = LiveKeys(server(file, entry("carol")))
    assert [key.name for key in keys.all] == ["carol", "alice"]
    write(file, entry("alice", models=["m"]), entry("bob"))
    keys.refresh()
    assert opens(keys, "lsk-bob") == "bob"
    assert keys.named("alice").models == ("m",)  # type: ignore[union-attr]
    write(file, entry("bob"))
    keys.refresh()
    assert opens(keys, "lsk-alice") == "invalid_api_key"
    assert opens(keys, "lsk-bob") == "bob"
    assert opens(keys, "lsk-carol") == "carol"
    with pytest.raises(Forbidden, match=r"'alice'.*no longer known"):
        keys.named("alice")


BROKEN = {
    "no YAML": "api_keys: [",
    "no list": "api_keys: 3",
    "no mapping": "- name: bob",
    "half of a hash": "api_keys: [{name: bob, hash: sha256:12}]",
    "a key of the configuration": yaml.safe_dump({"api_keys": [entry("carol")]}),
    "a hash of the configuration": yaml.safe_dump(
        {"api_keys": [{"name": "bob", "hash": hash_key("lsk-carol")}]}
    ),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_file_changes_nothing_and_is_told_once(
    file: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, entry("alice"))
    keys = LiveKeys(server(file, entry("carol")))
    replace_private(file, text)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for _ in range(3):
            keys.refresh()
    assert [record.message for record in caplog.records] == [
        f"{keys.problem}; the keys stay that were known before"
    ]
    assert str(file) in str(keys.problem)
    assert opens(keys, "lsk-alice") == "alice"
    assert opens(keys, "lsk-bob") == "invalid_api_key"
    write(file, entry("bob"))
    keys.refresh()
    assert keys.problem is None
    assert opens(keys, "lsk-bob") == "bob"


@pytest.mark.parametrize("make", ["missing", "broken", "empty"])
def test_without_any_key_in_the_file_nobody_enters(file: Path, make: str) -> None:
    if make != "missing":
        replace_private(file, "api_keys: [" if make == "broken" else "api_keys: []")
    keys = LiveKeys(server(file))
    assert (keys.problem is None) == (make == "empty")
    assert opens(keys, None) == opens(keys, "lsk-any") == "invalid_api_key"
    # What a batch has left waits for a file that can be used.
    with pytest.raises(Forbidden if make == "empty" else Unavailable):
        keys.named("alice")


def test_a_file_that_vanishes_takes_no_key_along(file: Path) -> None:
    write(file, entry("alice"))
    keys = LiveKeys(server(file))
    file.unlink()
    keys.refresh()
    assert "cannot be read" in str(keys.problem)
    assert opens(keys, "lsk-alice") == "alice"


@pytest.mark.parametrize("mode", [0o644, 0o620, 0o602])
def test_a_file_that_others_can_open_is_refused(file: Path, mode: int) -> None:
    write(file, entry("alice"))
    file.chmod(mode)
    with pytest.raises(ConfigError, match=rf"server.api_keys_file: .*mode {mode:04o}.*chmod 600"):
        read_keys(server(file))


def test_a_pipe_is_no_keys_file(file: Path) -> None:
    os.mkfifo(file, 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_keys(server(file))


def test_both_keys_of_a_rotation_open_and_have_one_name(file: Path) -> None:
    write(file, entry("alice", next_hash=hash_key("lsk-new")))
    keys = LiveKeys(server(file))
    assert opens(keys, "lsk-alice") == opens(keys, "lsk-new") == "alice"
    write(file, {"name": "alice", "hash": hash_key("lsk-new")})
    keys.refresh()
    assert opens(keys, "lsk-alice") == "invalid_api_key"
    assert opens(keys, "lsk-new") == "alice"


def test_a_key_expires_by_the_clock_wherever_it_is_used(file: Path) -> None:
    now_s = NEW_YEAR_S - 0.001
    write(file, entry("alice", expires_at=NEW_YEAR), entry("bob"))
    keys = LiveKeys(server(file), clock=lambda: now_s)
    assert keys.all[0].expires_at == datetime.fromtimestamp(NEW_YEAR_S, UTC)
    assert opens(keys, "lsk-alice") == "alice"
    assert keys.named("alice") is not None
    now_s = NEW_YEAR_S
    assert opens(keys, "lsk-alice") == "expired_api_key"
    with pytest.raises(Forbidden, match=r"'alice'.*has expired"):
        keys.named("alice")
    assert opens(keys, "lsk-bob") == "bob"


def test_work_without_a_key_needs_none_only_where_there_are_none(file: Path) -> None:
    assert LiveKeys(Server()).named("") is None
    with pytest.raises(Forbidden):
        LiveKeys(Server(api_keys=server(file, entry("carol")).api_keys)).named("")


def test_who_follows_sees_a_new_file_by_themselves(file: Path) -> None:
    write(file, entry("alice"))
    keys = LiveKeys(server(file))

    def wait_for_bob() -> None:
        ends_s = time.monotonic() + 10
        while opens(keys, "lsk-bob") != "bob" and time.monotonic() < ends_s:
            time.sleep(0.01)

    async def scenario() -> None:
        following = asyncio.create_task(keys.follow())
        await asyncio.sleep(0)
        write(file, entry("bob"))
        await asyncio.to_thread(wait_for_bob)
        following.cancel()

    asyncio.run(scenario())
    assert opens(keys, "lsk-bob") == "bob"
    assert opens(keys, "lsk-alice") == "invalid_api_key"


def test_a_file_of_the_same_size_and_second_is_seen(file: Path) -> None:
    write(file, entry("alice"))
    keys = LiveKeys(server(file))
    status = file.stat()
    write(file, entry("clara"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    keys.refresh()
    assert opens(keys, "lsk-clara") == "clara"
