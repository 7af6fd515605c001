"""A benchmark that is told to end leaves no server behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import PATIENCE_S

_BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.servers import Server

server = Server("sleeper", ["sleep", "600"], {}, 1, "/", Path(sys.argv[1]))
server.start()
try:
    print(server.members()[0].pid, flush=True)
    time.sleep(600)
finally:
    server.stop()
"""


def test_sigterm_ends_its_servers_too(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _BENCHMARK, str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as benchmark:
        assert benchmark.stdout is not None
        server = psutil.Process(int(benchmark.stdout.readline()))
        assert server.is_running()
        benchmark.terminate()
        assert benchmark.wait(PATIENCE_S) != 0
    assert not server.is_running()
