"""Several nodes on one machine: namespaces of Linux, joined by a bridge.

Each node has its own network address, processes with an init, host name, semaphores, ``/dev/shm``
and folder for runs; files are the machine's. Whatever a node is made of is gone with its first
process, and the network with the hub's, however the tests end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

INIT = Path(__file__).with_name("init.py")
_BOOT_TIMEOUT_S = 20.0
# Also if these are killed.
_END_WITH_TESTS = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = ("--mount", "--pid", "--uts", "--ipc", "--net")
_SHARED_MEMORY = "3g"
_TEMPORARY = "2g"


def why_not() -> str | None:
    """Why there can be no nodes here; None: there can."""
    for tool in ("unshare", "nsenter", "setpriv", "ip", "mount"):
        if shutil.which(tool) is None:
            return f"nodes need the command {tool}"
    if os.geteuid() != 0:
        return "nodes need root, or a user namespace (unshare -Urnmpf --mount-proc pytest ...)"
    tried = subprocess.run(
        ["unshare", *_NAMESPACES, "--fork", "--mount-proc", "mount", "--make-rprivate", "/"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if tried.returncode == 0 else f"namespaces are not allowed: {tried.stderr.strip()}"


class Command:
    """A command that was started on a node."""

    def __init__(self, entering: subprocess.Popen[bytes]) -> None:
        """``entering`` is nsenter, which waits for the command, and passes no signal on."""
        self._entering = entering

    @property
    def pid(self) -> int:
        """As the machine counts."""
        deadline = time.monotonic() + _BOOT_TIMEOUT_S
        while not (inside := psutil.Process(self._entering.pid).children()):
            assert time.monotonic() < deadline, "it has not begun"
            time.sleep(0.02)
        return inside[0].pid

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its status, if it has ended."""
        return self._entering.poll()

    def wait(self, timeout_s: float) -> int:
        """Its status, once it has ended."""
        return self._entering.wait(timeout_s)


class Node:
    """A machine of its own, as far as its processes can tell."""

    def __init__(self, name: str, address: str, hub: int, temporary: Path) -> None:
        """
        Args:
            name: Its host name, which another may have as well.
            address: Its address, of a network of 24 bits.
            hub: A process in the network that joins the nodes.
            temporary: A folder that each node has for itself.
        """
        self.name, self.address = name, address
        self._hub = hub
        self.temporary = temporary
        self._link = f"n{address.rpartition('.')[2]}-{hub}"
        self._outer: subprocess.Popen[bytes] | None = None

    def boot(self) -> None:
        """Start it, empty: what was in its memory is gone."""
        assert self._outer is None, f"{self.name} runs"
        mounts = " && ".join(
            [
                f"hostname {self.name}",
                "mount --make-rprivate /",
                f"mount -t tmpfs -o size={_SHARED_MEMORY} tmpfs /dev/shm",
                f"mount -t tmpfs -o size={_TEMPORARY},mode=700 tmpfs {self.temporary}",
                # Of this network namespace, not of the machine's.
                "mount -t sysfs sysfs /sys",
            ]
        )
        self._outer = subprocess.Popen(
            [
                *(*_END_WITH_TESTS, "unshare", *_NAMESPACES),
                *("--fork", "--mount-proc", "--kill-child"),
                *("sh", "-c", f"{mounts} && exec {sys.executable} -S {INIT}"),
            ],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        inside = self._init
        _in_network(self._hub, "link", "add", self._link, "type", "veth", "peer", "name", "eth0",
                    "netns", str(inside.pid))  # fmt: skip
        _in_network(self._hub, "link", "set", self._link, "master", "br0", "up")
        for words in (f"addr add {self.address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            _in_network(inside.pid, *words.split())

    @property
    def _init(self) -> psutil.Process:
        """Its process 1, as the machine sees it."""
        assert self._outer is not None, f"{self.name} is off"
        outer, deadline = psutil.Process(self._outer.pid), time.monotonic() + _BOOT_TIMEOUT_S
        while time.monotonic() < deadline:
            for child in outer.children():
                with contextlib.suppress(psutil.Error):
                    if str(INIT) in child.cmdline():
                        return child
            assert self._outer.poll() is None, self._outer.communicate()[1].decode()
            time.sleep(0.02)
        raise TimeoutError(f"{self.name} did not start")

    @property
    def is_on(self) -> bool:
        return self._outer is not None

    def start(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str] | None = None,
    ) -> Command:
        """Run a command on the node; what it says is appended to ``log``."""
        with log.open("ab") as out:
            return Command(
                subprocess.Popen(
                    self._entering(command),
                    env={**os.environ, "TMPDIR": str(self.temporary), **(environment or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                )
            )

    def output(self, *command: str, timeout_s: float = 60) -> str:
        """What a command on the node says; it must succeed."""
        done = subprocess.run(
            self._entering(command), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert done.returncode == 0, f"{command} on {self.name}: {done.stderr}"
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """All its processes but for the init, as the machine sees them."""
        space = os.readlink(f"/proc/{self._init.pid}/ns/pid")
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{process.pid}/ns/pid") == space:
                    found.append(process)
        return [process for process in found if process.pid != self._init.pid]

    def cut_power(self) -> None:
        """End every process of the node at once; its memory is lost, its peers hear nothing."""
        if self._outer is None:
            return
        # A machine without power sends no farewell: not even the kernel's to open connections.
        with contextlib.suppress(subprocess.CalledProcessError):
            self.partition()
        with contextlib.suppress(psutil.Error, AssertionError):
            self._init.send_signal(signal.SIGKILL)
        self._outer.communicate(timeout=_BOOT_TIMEOUT_S)
        self._outer = None
        # The kernel removes the link some time after the last process.
        with contextlib.suppress(subprocess.CalledProcessError):
            _in_network(self._hub, "link", "delete", self._link)

    def partition(self) -> None:
        """Pull its network cable."""
        _in_network(self._hub, "link", "set", self._link, "down")

    def heal(self) -> None:
        """Plug the network cable in again."""
        _in_network(self._hub, "link", "set", self._link, "up")

    def _entering(self, command: Sequence[str]) -> list[str]:
        # nsenter forks, and the command is its child, for the sake of the namespace of processes.
        flags = ["--mount", "--pid", "--uts", "--ipc", "--net", f"--wd={os.getcwd()}"]
        return ["nsenter", f"--target={self._init.pid}", *flags, *command]


def _in_network(pid: int, *words: str) -> None:
    """Run ``ip`` in the network of a process."""
    subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "ip", *words], check=True, capture_output=True
    )


@contextmanager
def network(*names: str) -> Iterator[tuple[Node, ...]]:
    """Nodes of these names, which run, and which this machine reaches."""
    ours = os.getpid()
    subnet = f"10.{100 + ours // 250 % 100}.{ours % 250}"
    # What keeps runs in it is the same path on all nodes, with contents of their own.
    temporary = Path(tempfile.mkdtemp(prefix="n", dir="/tmp"))
    hub = subprocess.Popen(
        [*_END_WITH_TESTS, "unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL
    )
    nodes: list[Node] = []
    try:
        _until_apart(hub.pid)
        for words in ("link set lo up", "link add br0 type bridge", "link set br0 up"):
            _in_network(hub.pid, *words.split())
        _join(hub.pid, f"{subnet}.254/24")
        for number, name in enumerate(names, start=1):
            nodes.append(Node(name, f"{subnet}.{number}", hub.pid, temporary))
            nodes[-1].boot()
        yield tuple(nodes)
    finally:
        for node in nodes:
            node.cut_power()
        # With the network's last process go its bridge and all links to it, in the kernel's time.
        subprocess.run(
            ["ip", "link", "delete", f"nodes{hub.pid}"], check=False, capture_output=True
        )
        hub.kill()
        hub.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def _join(hub: int, address: str) -> None:
    """Give this machine a link to the nodes' network."""
    mine = f"nodes{hub}"
    ours = str(os.getpid())
    _in_network(hub, "link", "add", "machine", "type", "veth", "peer", "name", mine, "netns", ours)
    _in_network(hub, "link", "set", "machine", "master", "br0", "up")
    for of_mine in (f"addr add {address} dev {mine}", f"link set {mine} up"):
        subprocess.run(["ip", *of_mine.split()], check=True, capture_output=True)


def _until_apart(pid: int) -> None:
    deadline = time.monotonic() + _BOOT_TIMEOUT_S
    ours = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{pid}/ns/net") == ours:
        if time.monotonic() > deadline:
            raise TimeoutError("the nodes' network was not made")
        time.sleep(0.01)
