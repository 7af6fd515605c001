"""The servers under test: started as process trees, bound to cores, frozen, and ended whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.harness import NotMeasuredError
from benchmarks.load import Outcome, Target

ENGINE_CORE = 0
"""The measured engine computes here: its worker alone, or the step of an engine in one process."""
OTHER_CORE = 1
"""Everything else runs here: front ends, an EngineCore with workers of its own, idle engines, Ray,
and the load generator."""

# vLLM names its processes. The worker is the one that computes, or EngineCore where it has none.
_WORKER_TITLE = "VLLM::Worker"
_ENGINE_TITLE = "VLLM::EngineCore"
_STOP_S = 30.0
_RECOVERY_S = 60.0
_SETTLE_S = 3.0
_FIRST_ANSWER_S = 5.0


class ServerFailedError(NotMeasuredError):
    """A server did not start or went away; the message ends with the tail of its log."""


@dataclass(frozen=True)
class EngineFlags:
    """What both arms' engines are started with, under vLLM's names.

    Eager, because engines that are to lend or to move layers run so. ``max_num_batched_tokens`` is
    the bare server's own default, given because vLLM's default depends on who starts the engine.
    """

    max_model_len: int = 2048
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    block_size: int = 32
    kv_cache_memory_bytes: int = 512 * 2**20
    enforce_eager: bool = True
    dtype: str = "auto"

    def arguments(self) -> list[str]:
        return [
            f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
            for name, value in vars(self).items()
            if value not in ("auto", False)
        ]

    def options(self) -> dict[str, int | str]:
        """As ``models[].engine`` of a Loomserve configuration, which sizes KV memory elsewhere."""
        return {
            name: value
            for name, value in vars(self).items()
            if name != "kv_cache_memory_bytes" and value != "auto"
        }


@dataclass
class Server:
    """One command that serves HTTP, and the processes it starts."""

    name: str
    command: Sequence[str]
    environment: dict[str, str]
    port: int
    ready_path: str
    log: Path
    _process: subprocess.Popen[bytes] | None = None
    _members: set[psutil.Process] = field(default_factory=set)

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():
            # A benchmark that is told to end ends its servers first, as one that gets Ctrl-C does.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Of this session: Linux shares cores among sessions, and let a client in one of its
                # own wait for twenty seconds while four engines filled two cores.
                process_group=0,
            )

    def members(self) -> list[psutil.Process]:
        """All living processes of the tree, those included whose parent has ended meanwhile."""
        assert self._process is not None, "start() first"
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self._process.pid)
            self._members |= {root, *root.children(recursive=True)}
        self._members = {member for member in self._members if member.is_running()}
        return list(self._members)

    def wait_ready(self, timeout: float) -> None:
        """Return when ``ready_path`` answers 200.

        Raises:
            ServerFailedError: the process ended, or ``timeout`` seconds passed.
        """
        assert self._process is not None, "start() first"
        deadline = time.monotonic() + timeout
        while not self._answers():
            if (code := self._process.poll()) is not None:
                raise ServerFailedError(
                    f"{self.name} ended with {code} while starting:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                raise ServerFailedError(
                    f"{self.name} was not ready after {timeout:.0f} s (--start-timeout):\n"
                    + self.tail()
                )
            time.sleep(0.5)

    def _answers(self) -> bool:
        try:
            url = f"http://127.0.0.1:{self.port}{self.ready_path}"
            with urllib.request.urlopen(url, timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def tail(self, lines: int = 40) -> str:
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join([f"--- the end of {self.log} ---", *text.splitlines()[-lines:]])

    def bind(self) -> None:
        """Put every thread on its core: those of a process that computes stay where they were
        bound, all else goes to ``OTHER_CORE``.

        Done after the start because OpenMP drops places outside the affinity it starts with, so a
        server started on ``OTHER_CORE`` would compute there. Later threads and processes inherit.

        Raises:
            ServerFailedError: no process computes, or one is not bound to a single core.
        """
        computing = 0
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                if computes(member):
                    computing += 1
                    if len(member.cpu_affinity()) != 1:
                        raise ServerFailedError(f"{self.name}: an engine is not bound to one core")
                else:
                    for thread in member.threads():
                        with contextlib.suppress(ProcessLookupError):
                            os.sched_setaffinity(thread.id, {OTHER_CORE})
        if not computing:
            raise ServerFailedError(
                f"{self.name}: no process is named {_WORKER_TITLE} or {_ENGINE_TITLE}"
            )

    def cpu_seconds(self) -> float:
        """CPU time so far of the tree."""
        total = 0.0
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = member.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int:
        """Proportional set size of the tree: shared pages count once over all processes."""
        total = 0
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += member.memory_full_info().pss
        return total

    def signal(self, number: signal.Signals) -> None:
        for member in self.members():
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(number)

    def ask_to_stop(self) -> None:
        if self._process is not None:
            self.signal(signal.SIGCONT)
            self._process.terminate()

    def stop(self) -> None:
        """Ask the main process to end, and kill what is left of the tree."""
        if self._process is None:
            return
        members = self.members()
        self.ask_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        _, left = psutil.wait_procs(members, timeout=5)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=5)
        self._process.wait()
        self._process = None


def computes(process: psutil.Process) -> bool:
    """Whether it is an engine's, and the one that computes there."""
    title = _title(process)
    if title.startswith(_ENGINE_TITLE):
        return not any(_title(child).startswith(_WORKER_TITLE) for child in process.children())
    return title.startswith(_WORKER_TITLE)


def of_engine(process: psutil.Process) -> bool:
    """Whether it is an engine's, or one of its workers."""
    return _title(process).startswith((_ENGINE_TITLE, _WORKER_TITLE))


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


@dataclass
class Arm:
    """One side of the comparison: what serves it, and where the load goes."""

    name: str
    servers: list[Server]
    target: Target
    other: Target | None = None
    """Its second model, which most loads leave idle."""

    @property
    def targets(self) -> list[Target]:
        return [self.target, self.other] if self.other else [self.target]

    def freeze(self) -> None:
        """Stop every process of the arm, so that its idle work cannot touch the other's result."""
        for server in self.servers:
            server.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        for server in self.servers:
            server.signal(signal.SIGCONT)
        # A platform finds its heartbeats expired, for the clock went on; it must recover first.
        for server in self.servers:
            server.wait_ready(_RECOVERY_S)
        time.sleep(_SETTLE_S)
        for server in self.servers:
            server.wait_ready(_RECOVERY_S)

    def idle_cores(self, seconds: float) -> float:
        """CPU seconds a second while no request runs."""
        before, begin = [server.cpu_seconds() for server in self.servers], time.monotonic()
        time.sleep(seconds)
        after = [server.cpu_seconds() for server in self.servers]
        return (sum(after) - sum(before)) / (time.monotonic() - begin)

    def answered(self, outcomes: Sequence[Outcome], what: str = "") -> Sequence[Outcome]:
        """The outcomes, all of which must be whole answers.

        Raises:
            NotMeasuredError: a request failed.
        """
        if errors := [one.error for one in outcomes if one.error]:
            shown = "\n".join(sorted(set(errors))[:5])
            tails = "\n".join(server.tail() for server in self.servers)
            raise NotMeasuredError(
                f"{self.name}{what}: {len(errors)} of {len(outcomes)} requests failed:\n"
                f"{shown}\n{tails}"
            )
        return outcomes


@contextlib.contextmanager
def running(arms: Sequence[Arm], start_timeout: float, *, bind: bool = True) -> Iterator[None]:
    """Start the arms one after another, each one's servers at once, and end all whatever happens.

    With ``bind``, all but workers share ``OTHER_CORE``.

    Raises:
        ServerFailedError: a server did not start within ``start_timeout`` seconds.
    """
    try:
        for arm in arms:
            begin = time.monotonic()
            for server in arm.servers:
                server.start()
            for server in arm.servers:
                server.wait_ready(start_timeout)
                if bind:
                    server.bind()
            # A platform asks itself a first question once it is ready.
            time.sleep(_FIRST_ANSWER_S)
            print(f"{arm.name} is up after {time.monotonic() - begin:.0f} s", flush=True)
            arm.freeze()
        yield
    finally:
        servers = [server for arm in arms for server in arm.servers]
        for server in servers:
            server.ask_to_stop()
        for server in servers:
            server.stop()


def bare_arm(
    name: str,
    model: str,
    flags: EngineFlags,
    port: int,
    logs: Path,
    engines: int = 2,
    more: Sequence[str] = (),
    models: Sequence[str] = ("measured", "idle"),
) -> Arm:
    """vLLM's own server, and a second one where there are two engines; ``more`` are further words
    of their command lines, ``models`` their models' names.

    The second stands for the second model: where Loomserve is measured with two models configured,
    both arms hold two engines, and the difference is the platform alone.
    """
    servers = []
    for core, of in zip((ENGINE_CORE, OTHER_CORE)[:engines], models, strict=False):
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", model, "--served-model-name", of),
            *("--host", "127.0.0.1", "--port", str(port + core)),
            *flags.arguments(),
            *more,
        ]
        environment = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "OMP_NUM_THREADS": "1"}
        log = logs / f"{name}-{core}.log"
        servers.append(Server(f"{name}-{core}", command, environment, port + core, "/health", log))
    targets = map(Target, (f"http://127.0.0.1:{one.port}" for one in servers), models)
    return Arm(name, servers, *targets)
