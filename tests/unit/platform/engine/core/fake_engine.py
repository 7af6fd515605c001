"""A child that speaks to its replica as an engine's process does, and computes nothing."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from loomserve.platform.engine.core.control import ControlLink
from loomserve.platform.engine.core.messages import EngineFacts
from loomserve.platform.engine.core.output_sender import WakingQueue
from loomserve.platform.state import ReplicaLoad


class Meter:
    def read(self) -> ReplicaLoad:
        return ReplicaLoad(
            running=2, waiting=0, kv_cache_usage=0.5, step_time_s=0.0, measured_at=1.0
        )

    def page(self) -> str:
        return "oldest 2\n"


class Outputs(WakingQueue):
    """As if a thread read it."""

    def turn(self) -> int:
        self.done += 1
        return self.done


class FakeCore:
    output_queue = Outputs()
    meter = Meter()
    asked = looks = level = 0

    def between_steps(self, work: Callable[[], None]) -> None:
        work()

    def collective_rpc(self, method: str, timeout: float | None, args: tuple[Any, ...]) -> Any:
        match method:
            case "level":
                return [self.level]
            case "echo":
                return [list(args)]
            case "refuse":
                raise ValueError("refused")
            case "odd":
                raise LookupError("odd")
            case "environment":
                return [os.environ.get(args[0])]
            case "say":
                print(*args, flush=True)
            case "exit":
                os._exit(args[0])
            case "sleep":
                time.sleep(args[0])
            case "compute":
                until = time.process_time() + args[0]
                while time.process_time() < until:
                    pass
        return []

    def facts(self) -> EngineFacts:
        return EngineFacts(
            pid=os.getpid(), max_model_len=8, max_running=2, blocks=4, block_tokens=16, layers=1,
            kv_heads=1, item_bytes=4,
        )  # fmt: skip

    def move_requests(self, to: str, most: int) -> int:
        self.asked, self.looks = most, 0
        return most

    def moved(self) -> tuple[int, int]:
        """At each look one more has left; the fourth never does."""
        self.looks += 1
        left = min(self.looks, self.asked, 3)
        return left, self.asked - left

    def fall_asleep(self, level: int) -> None:
        if self.asked:
            raise ValueError("it has requests")
        self.level = level

    def wake(self) -> None:
        self.level = 0

    def stop(self) -> None:
        time.sleep(0.1)
        os._exit(0)


def main(descriptor: int, how: str = "") -> None:
    link = ControlLink(socket.socket(fileno=descriptor))
    mode = link.awaited_start().options["mode"]
    threading.Thread(target=link.serve, daemon=True).start()
    if mode == "fails":
        link.failed(OSError("no weights\nand a trace"))
        sys.exit(1)
    if mode == "dies":
        os.abort()
    if mode == "hangs":
        time.sleep(60)
    link.started(FakeCore())
    time.sleep(60)


if __name__ == "__main__":
    main(int(sys.argv[1]))
