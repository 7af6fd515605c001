"""What a pod needs before Ray starts in it, and what its processes read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from loomserve.platform.access.keys import VARIABLES, hash_key, with_given_hashes
from loomserve.platform.base.errors import StartError
from loomserve.platform.config.loader import parse
from loomserve.platform.kubernetes.pods import (
    INTERNAL_TOKEN_VARIABLE,
    internal_token,
    prepare_pod,
    read_config,
)
from loomserve.platform.kubernetes.values import digest
from loomserve.platform.run.folder import RUN_VARIABLE

CONFIG = parse("models: {m: demo}")


def test_a_container_that_starts_again_finds_an_empty_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, memory = tmp_path / "run", tmp_path / "memory"
    monkeypatch.setenv(RUN_VARIABLE, str(run))
    memory.mkdir()
    prepare_pod(memory)
    (run / "sockets/engine").touch()
    for name in ("psm_1a", "loomserve-ring-3-x", "sem.loky-1"):
        (memory / name).touch()
    # The next KV store takes its blocks over; what else is there is not the platform's.
    (memory / "loomserve-10001").mkdir()
    (memory / "weights").touch()
    prepare_pod(memory)
    assert {path.name for path in run.iterdir()} == {"sockets", "tmp"}
    assert list((run / "sockets").iterdir()) == []
    assert {path.name for path in memory.iterdir()} == {"loomserve-10001", "weights"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in run.iterdir())


def test_preparing_is_for_pods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_VARIABLE, raising=False)
    with pytest.raises(StartError, match=RUN_VARIABLE):
        prepare_pod()


@pytest.mark.parametrize("token", ["", "short"])
def test_a_platform_without_a_token_does_not_start(
    token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERNAL_TOKEN_VARIABLE, token)
    with pytest.raises(StartError, match="32 characters"):
        internal_token()


def test_waits_until_the_pod_has_the_new_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    changing = threading.Timer(0.2, path.write_text, ["new"])
    changing.start()
    assert read_config(path, digest("new"), timeout_s=30) == "new"


def test_does_not_wait_for_ever(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(StartError, match="another hand"):
        read_config(path, digest("new"), timeout_s=0)
    with pytest.raises(StartError, match="cannot read"):
        read_config(tmp_path / "none.yaml", digest("new"), timeout_s=0)


def test_hashes_of_tokens_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_given_hashes(CONFIG) == CONFIG
    monkeypatch.setenv(VARIABLES["admin_token_hash"], hash_key("admin"))
    monkeypatch.setenv(VARIABLES["metrics_token_hash"], hash_key("metrics"))
    server = with_given_hashes(CONFIG).server
    assert server.admin_token_hash == hash_key("admin")
    assert server.metrics_token_hash == hash_key("metrics")
    own = CONFIG.model_copy(
        update={"server": server.model_copy(update={"admin_token_hash": hash_key("own")})}
    )
    assert with_given_hashes(own).server.admin_token_hash == hash_key("own")


def test_a_hash_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLES["admin_token_hash"], "lsk-a-token-itself")
    with pytest.raises(StartError, match="no hash") as raised:
        with_given_hashes(CONFIG)
    assert "itself" not in str(raised.value)


def test_one_token_for_both_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, hash_key("same"))
    with pytest.raises(StartError, match="Prometheus"):
        with_given_hashes(CONFIG)
