from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from loomserve.platform.access.keys import hash_key
from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import LoomserveError
from loomserve.platform.cli.main import app
from loomserve.platform.config import Server


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    content = {
        "devices": [{"name": "core0", "kind": "cpu", "cores": [0]}],
        "models": [],
        "server": {
            "api_keys": [{"name": "carol", "hash": hash_key("lsk-carol"), "models": ["m"]}],
            "api_keys_file": "keys.yaml",
        },
    }
    path.write_text(yaml.safe_dump(content))
    return path


def run(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["key", *map(str, arguments)])
    if result.exception is not None:
        raise result.exception
    return result.output


def key_in(output: str) -> str:
    found = re.search(r"lsk-\S+", output)
    assert found
    return found[0]


def live(config: Path) -> LiveKeys:
    return LiveKeys(Server(api_keys_file=str(config.parent / "keys.yaml")))


def name_of(config: Path, key: str) -> str | None:
    try:
        found = live(config).ring.identify(key)
    except LoomserveError:
        return None
    return found.name if found else None


def test_a_key_is_made_rotated_and_revoked_in_a_private_file(config: Path) -> None:
    first = key_in(run("create", "alice", "--add", config))
    other = key_in(run("create", "bob", "--add", config))
    file = config.parent / "keys.yaml"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert first not in file.read_text()
    assert name_of(config, first) == "alice"
    assert name_of(config, other) == "bob"
    second = key_in(run("rotate", "alice", config))
    assert name_of(config, first) == name_of(config, second) == "alice"
    run("rotate", "alice", config, "--finish")
    assert (name_of(config, first), name_of(config, second)) == (None, "alice")
    run("revoke", "alice", config)
    assert (name_of(config, second), name_of(config, other)) == (None, "bob")


def test_what_an_operator_wrote_of_a_key_outlives_the_commands(config: Path) -> None:
    file = config.parent / "keys.yaml"
    run("create", "alice", "--add", config)
    content = yaml.safe_load(file.read_text())
    more = {"expires_at": "2099-01-31T00:00:00+02:00", "models": ["m"], "requests_per_minute": 7}
    content["api_keys"][0] |= more
    file.write_text(yaml.safe_dump(content))
    run("create", "bob", "--add", config)
    kept = live(config).all[0]
    assert kept.requests_per_minute == 7
    assert kept.models == ("m",)
    assert str(kept.expires_at) == "2099-01-31 00:00:00+02:00"
    assert live(config).problem is None


def test_the_list_has_names_and_limits_and_no_secret(config: Path) -> None:
    secret = key_in(run("create", "alice", "--add", config))
    shown = run("list", config)
    assert "alice" in shown
    assert re.search(r"carol +m .*configuration", shown)
    for hidden in (secret, hash_key(secret), hash_key("lsk-carol"), "sha256"):
        assert hidden not in shown


def test_without_add_the_entry_is_printed_and_nothing_written(config: Path) -> None:
    output = run("create", "alice")
    assert hash_key(key_in(output)) in output
    assert not (config.parent / "keys.yaml").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "alice", "--add"), "there is a key 'alice' already"),
        (("create", "carol", "--add"), "there is a key 'carol' already"),
        (("create", "no good", "--add"), "is no name of a key"),
        (("revoke", "carol"), "stands in the configuration itself"),
        (("revoke", "dave"), "has no key 'dave'; it has: alice"),
        (("rotate", "alice", "--finish"), "has one key only"),
    ],
)
def test_errors_say_what_to_do(config: Path, arguments: tuple[str, ...], words: str) -> None:
    run("create", "alice", "--add", config)
    before = (config.parent / "keys.yaml").read_text()
    with pytest.raises(LoomserveError, match=words):
        run(*arguments, config)
    assert (config.parent / "keys.yaml").read_text() == before


def test_a_third_key_is_not_made(config: Path) -> None:
    run("create", "alice", "--add", config)
    run("rotate", "alice", config)
    with pytest.raises(LoomserveError, match="has two keys already"):
        run("rotate", "alice", config)


def test_a_configuration_without_a_file_says_so(config: Path) -> None:
    config.write_text(config.read_text().replace("api_keys_file: keys.yaml", "port: 8000"))
    with pytest.raises(LoomserveError, match=r"server.api_keys_file.*set it"):
        run("revoke", "alice", config)


def test_config_check_looks_at_the_keys_file(config: Path) -> None:
    run("create", "alice", "--add", config)
    (config.parent / "keys.yaml").write_text("api_keys: [")
    result = CliRunner().invoke(app, ["config", "check", str(config)])
    assert "keys.yaml:1: not valid YAML" in str(result.exception)
