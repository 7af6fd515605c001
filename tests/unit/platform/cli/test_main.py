"""The command refuses, before it starts anything, with one clear sentence and exit code 2."""

from __future__ import annotations

import json
import re
import socket
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from loomserve.deployments import planning
from loomserve.platform.access.keys import hash_key
from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.cli import main, serve
from loomserve.platform.cli.checks import machine
from loomserve.platform.config import load
from loomserve.platform.rebalancing.plans.store import PlanStore, plans_folder
from loomserve.platform.run import ending

DEVICES = [{"name": "core0", "kind": "cpu", "cores": [0]}]
MODEL = {"name": "m", "source": "demo", "devices": ["core0"], "engine": {"enforce_eager": True}}


def write(folder: Path, **changes: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"devices": DEVICES, "models": [MODEL], **changes}))
    return path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["loomserve", *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return int(ended.value.code or 0)


def model_folder(folder: Path, weights: bytes | None, config: bool = True) -> str:
    model = folder / "model"
    model.mkdir()
    if config:
        (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    (model / "tokenizer.json").write_text("{}")
    if weights is not None:
        (model / "model.safetensors").write_bytes(weights)
    return str(model)


def test_the_command_says_which_version_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "--version") == 0
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"loomserve {project['version']}\n"


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda _: {"models": [MODEL, MODEL]}, "two models are named 'm'"),
        (lambda _: {"models": [{**MODEL, "devices": ["core0", "core0"]}]}, "a device twice"),
        (lambda _: {"models": [{**MODEL, "kv_cache_memory": "-1GiB"}]}, "kv_cache_memory"),
        (lambda _: {"models": [{**MODEL, "replicas": 2}]}, "2 replicas"),
        (lambda _: {"server": {"host": "0.0.0.0"}}, "api_keys"),
        (lambda _: {"devices": [{**DEVICES[0], "cores": [4096]}]}, "core 4096"),
        (
            lambda folder: {"models": [{**MODEL, "source": model_folder(folder, b"", False)}]},
            "config.json",
        ),
        (
            lambda folder: {"models": [{**MODEL, "source": model_folder(folder, b"\0" * 64)}]},
            "model.safetensors",
        ),
        (lambda _: {"models": [{**MODEL, "source": "./nowhere"}]}, "nowhere"),
    ],
)
def test_what_cannot_be_served_is_refused_at_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[Path], dict[str, object]],
    part: str,
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    changes = {"server": {"port": port}, **change(tmp_path)}
    assert run(monkeypatch, "serve", str(write(tmp_path, **changes))) == 2
    said = capsys.readouterr().err
    assert said.startswith("loomserve: ")
    assert part in said
    assert "Traceback" not in said


def test_what_nobody_expected_is_a_paragraph_too_unless_more_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(path: Path) -> None:
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(main.configuration, "load", fails)
    monkeypatch.setattr(ending, "_shown", False)
    assert run(monkeypatch, "config", "check", "x.yaml") == 1
    assert capsys.readouterr().err == (
        "loomserve: RuntimeError: the disk is on fire (loomserve --debug shows where)\n"
    )
    for words in (("--debug", "config", "check"), ("serve", "--debug"), ("--debug", "serve")):
        monkeypatch.setattr(ending, "_shown", False)
        assert run(monkeypatch, *words, "x.yaml") == 1
        assert "in fails" in capsys.readouterr().err


def test_a_node_too_shows_where_an_error_was_raised_if_it_is_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for shown in (False, True):
        monkeypatch.setattr(ending, "_shown", False)
        assert run(monkeypatch, "node", "--address", "nowhere", *(["--debug"] * shown)) == 2
        assert ("Traceback" in capsys.readouterr().err) is shown


def test_a_busy_port_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        path = write(tmp_path, server={"port": sock.getsockname()[1]})
        assert run(monkeypatch, "serve", str(path)) == 2
    assert "set server.port" in capsys.readouterr().err


def test_a_missing_compiler_matters_only_where_vllm_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    server = {"port": port}
    serve.check_machine(load(write(tmp_path, server=server)), tmp_path)
    compiled = {**MODEL, "engine": {}}
    with pytest.raises(StartError, match=r"install g\+\+"):
        serve.check_machine(load(write(tmp_path, server=server, models=[compiled])), tmp_path)


def test_a_folder_for_plans_that_cannot_be_used_is_said_only_where_plans_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_CLAIM_TIMEOUT_S", 0.0)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    for controller, folder in (("off", "config.yaml/plans"), ("auto", "plans")):
        section = {"controller": controller, "folder": folder}
        checked = load(write(tmp_path, server={"port": port}, rebalancing=section))
        serve.check_machine(checked, tmp_path)
    other = PlanStore(plans_folder(checked, tmp_path))
    assert other.claim()
    with pytest.raises(StartError, match=r"another platform .* set rebalancing\.folder"):
        serve.check_machine(checked, tmp_path)
    other.release()
    section = {"controller": "advise", "folder": "config.yaml/plans"}
    unusable = load(write(tmp_path, server={"port": port}, rebalancing=section))
    with pytest.raises(StartError, match=r"rebalancing\.folder"):
        serve.check_machine(unusable, tmp_path)


def test_too_little_memory_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, models=[{**MODEL, "kv_cache_memory": "100TiB"}])
    monkeypatch.setattr(planning.catalog, "resolve", lambda *_, **__: tmp_path)
    monkeypatch.setattr(planning.model_files, "held_bytes", lambda *_, on_gpus: 0)
    with pytest.raises(StartError, match="lower kv_cache_memory"):
        planning.plan(load(path), tmp_path, print)


def test_too_little_shared_memory_is_said_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    path = write(tmp_path, server={"port": port}, kvstore={"memory": "100TiB"})
    assert run(monkeypatch, "serve", str(path)) == 2
    assert re.search(r"kvstore\.memory asks for \d+ MiB and /dev/shm has \d+ MiB free: lower it",
                     capsys.readouterr().err)  # fmt: skip


def test_a_created_keys_hash_is_what_the_configuration_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "key", "create", "alice") == 0
    lines = capsys.readouterr().out.splitlines()
    key, entry = (line.split(": ", 1)[1] for line in lines)
    assert yaml.safe_load(entry) == {"name": "alice", "hash": hash_key(key)}


def test_a_model_is_checked_against_vllms_own_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, models=[{**MODEL, "engine": {"max_modell_len": 5}}])
    assert run(monkeypatch, "config", "check", str(path)) == 2
    assert "did you mean 'max_model_len'?" in capsys.readouterr().err


def test_a_predictor_that_was_not_trained_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    path = write(tmp_path, models=[{**MODEL, "lengths": {"predictor": "chat-v1"}}])
    with pytest.raises(ConfigError, match="loomserve lengths train FILES --name chat-v1"):
        planning.plan(load(path), tmp_path, print)
    assert run(monkeypatch, "config", "check", str(path)) == 2
    assert "lengths train FILES --name chat-v1" in capsys.readouterr().err
