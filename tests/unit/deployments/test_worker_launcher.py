"""A Ray worker's process that is forked, with a script in the place of Ray's."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import pytest

from loomserve.deployments import forked_worker
from loomserve.deployments.worker_launcher import py_executable
from loomserve.platform.engine.process.fork_server import LONGEST_MESSAGE
from loomserve.platform.engine.process.forking import address
from loomserve.platform.engine.process.kept_fork_server import KeptForkServer
from loomserve.platform.run.folder import PYTHON_VARIABLE, RUN_VARIABLE, RunFolder
from tests.fork_servers import fork_server_of
from tests.waiting import PATIENCE_S, within

SCRIPT = """
import json, os, signal, sys, time
print(json.dumps({
    "pid": os.getpid(), "parent": os.getppid(), "group": os.getpgid(0), "arguments": sys.argv,
    "folder": os.getcwd(), "said": os.environ.get("SAID"), "main": __name__, "path": sys.path[0],
    "ray": "ray" in sys.modules,
    "interrupted": signal.getsignal(signal.SIGINT) is not signal.SIG_IGN,
    "input": os.readlink("/proc/self/fd/0"),
}), flush=True)
print("trouble", file=sys.stderr, flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


PYTHON = py_executable("ray::Some")


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "a worker.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[KeptForkServer]:
    with fork_server_of([forked_worker.__name__]) as (folder, server):
        monkeypatch.setenv(RUN_VARIABLE, folder)
        yield server


def launch(script: Path, argument: str) -> subprocess.Popen[str]:
    """As Ray does: a shell runs what its runtime environment says."""
    return subprocess.Popen(
        ["bash", "-c", f"exec {py_executable('ray::Some')} '{script}' {argument} 'two words'"],
        env={**os.environ, "SAID": "by Ray"},
        cwd=script.parent,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(launched: subprocess.Popen[str]) -> dict[str, Any]:
    assert launched.stdout is not None
    found: dict[str, Any] = json.loads(launched.stdout.readline())
    return found


def check_is_the_worker(found: dict[str, Any], script: Path) -> None:
    assert found["arguments"] == [str(script), found["arguments"][1], "two words"]
    assert (found["main"], found["path"]) == ("__main__", str(script.parent))
    assert (found["folder"], found["said"]) == (str(script.parent), "by Ray")
    assert found["input"] == os.devnull
    assert not found["ray"], "it would be the worker of its fork server's environment"


def test_a_worker_is_forked_and_ends_with_its_status(
    script: Path, fork_server: KeptForkServer
) -> None:
    launched = launch(script, "3")
    found = told(launched)
    check_is_the_worker(found, script)
    assert found["parent"] == fork_server.pid
    assert found["group"] == found["pid"], "Ray would end its fork server's group with it"
    assert found["interrupted"], "its fork server is not"
    out, err = launched.communicate(timeout=PATIENCE_S)
    assert (out, err, launched.returncode) == ("", "trouble\n", 3)


def test_a_worker_has_the_title_that_it_was_given(
    script: Path, fork_server: KeptForkServer
) -> None:
    launched = launch(script, "wait")
    (title, *_) = psutil.Process(told(launched)["pid"]).cmdline()
    assert title == "ray::Some"
    launched.kill()
    launched.communicate()


@pytest.mark.parametrize("ended", ["launcher", "worker"])
def test_a_worker_and_its_launcher_end_together(
    ended: str, script: Path, fork_server: KeptForkServer
) -> None:
    launched = launch(script, "wait")
    worker = psutil.Process(told(launched)["pid"])
    (launched if ended == "launcher" else worker).kill()
    launched.communicate(timeout=PATIENCE_S)
    assert launched.returncode != 0
    within(10, lambda: not worker.is_running())


@pytest.mark.parametrize("why", ["no run", "no socket", "ended"])
def test_without_a_fork_server_the_launcher_becomes_the_worker(
    why: str, script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as until_end:
        if why == "no run":
            monkeypatch.delenv(RUN_VARIABLE, raising=False)
        else:
            folder = until_end.enter_context(TemporaryDirectory(prefix="run"))
            monkeypatch.setenv(RUN_VARIABLE, folder)
        if why == "ended":
            listener = until_end.enter_context(listening(RunFolder(Path(folder))))
        launched = launch(script, "4")
        if why == "ended":
            taken, _ = listener.accept()
            taken.recv(LONGEST_MESSAGE)
            taken.close()
        found = told(launched)
        check_is_the_worker(found, script)
        assert found["pid"] == launched.pid
        _, err = launched.communicate(timeout=PATIENCE_S)
        assert launched.returncode == 4
        assert ("no fork server" in err) == (why == "ended")


def listening(run: RunFolder) -> socket.socket:
    """In the place of a fork server."""
    run.sockets.mkdir()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address(run))
    listener.listen()
    return listener


def test_a_worker_that_is_interrupted_hears_of_it(
    script: Path, fork_server: KeptForkServer
) -> None:
    launched = launch(script, "wait")
    os.kill(told(launched)["pid"], signal.SIGINT)
    _, err = launched.communicate(timeout=PATIENCE_S)
    assert "KeyboardInterrupt" in err


def test_each_node_runs_workers_by_a_python_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the platform says is for all nodes of a cluster, on which Python may be elsewhere."""

    def expanded() -> str:
        return subprocess.check_output(
            ["bash", "-c", f"echo {py_executable('ray::Some')}"], text=True
        )

    monkeypatch.setenv(PYTHON_VARIABLE, "/there/bin/python")
    assert expanded() == "/there/bin/python -m loomserve.deployments.worker_launcher ray::Some\n"
    monkeypatch.delenv(PYTHON_VARIABLE)
    assert expanded().startswith(f"{sys.executable} -m ")


# What an engine on a GPU imports beyond that.
LENDING_ENGINE = (
    "loomserve.platform.lending.engine.gpu_worker",
    "loomserve.platform.engine.executor",
)
IMPORT_FOR_GPUS = f"""
import importlib, sys
from loomserve.deployments.forked_worker import preloaded
from loomserve.platform.engine.process.fork_server import cuda_is_initialized
for module in (*preloaded("cuda"), *{LENDING_ENGINE}):
    importlib.import_module(module)
import torch
assert not [each for each in sys.modules if each.startswith("vllm.v1.worker.cpu")]
assert torch.cuda.Stream.__module__ == "torch.cuda.streams", torch.cuda.Stream
assert torch.cuda.stream.__module__ == "torch.cuda", torch.cuda.stream
assert not cuda_is_initialized()
"""


@pytest.mark.heavy
def test_forked_engines_of_gpus_have_their_streams() -> None:
    """vLLM's CPU worker replaces them by ones that do nothing, for whoever imports it: nobody would
    wait for a copy any more."""
    subprocess.run([sys.executable, "-c", IMPORT_FOR_GPUS], check=True)
