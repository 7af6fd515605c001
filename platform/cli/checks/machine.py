"""Whether this machine has what a configuration asks for, before anything starts."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from loomserve.kvstore.server.options import left_behind
from loomserve.platform.base.errors import StartError
from loomserve.platform.batch.folder import BatchFolder, batch_folder
from loomserve.platform.config import LOCAL_NODE, Config
from loomserve.platform.devices.gpus import apart_here, check_devices, gpus_here
from loomserve.platform.devices.machine import check_compiler
from loomserve.platform.devices.memory import check_shared_memory
from loomserve.platform.engine.hooks import verify
from loomserve.platform.fleet.lending_pairs import check_reach
from loomserve.platform.http.server import listen
from loomserve.platform.rebalancing.plans.store import PlanStore, StoreError, plans_folder

_POLL_S = 0.5
_CLAIM_TIMEOUT_S = 5.0

Check = Callable[[], object]


def check_machine(config: Config, base: Path) -> None:
    """Check the machine, to fail now rather than at the first request. Raises StartError, which
    says what to do, for a busy port, a core, a GPU, a compiler or a folder that is not there, or a
    vLLM or Ray that lacks what Loomserve builds on."""
    for check in machine_checks(config, base):
        check()


def machine_checks(config: Config, base: Path) -> Iterator[Check]:
    """What :func:`check_machine` does, each by itself; each raises a ``StartError``."""
    yield lambda: verify("vllm")
    yield lambda: verify("ray")
    if config.cluster is not None:
        return  # its nodes are checked by themselves, once it is joined
    yield from _checks_of_what_one_has(config, base)
    yield lambda: _check_cores(config)
    yield lambda: check_devices(config.devices, LOCAL_NODE, gpus_here())
    yield lambda: check_reach(config, LOCAL_NODE, apart_here())
    if (store := config.kvstore) is not None:
        yield lambda: check_shared_memory(store.memory, left_behind(config.server.port))
    yield lambda: check_compiler(config.models)


def check_what_one_has(config: Config, base: Path) -> None:
    """Check ports and folders that one platform at a time can have; StartError: another has one."""
    for check in _checks_of_what_one_has(config, base):
        check()


def _checks_of_what_one_has(config: Config, base: Path) -> Iterator[Check]:
    for name, port in zip(("port", "admin_port"), config.server.ports, strict=False):
        yield partial(_check_port, name, config.server.host, port)
    yield lambda: _check_batch_folder(config, base)
    yield lambda: _check_plans_folder(config, base)


def _check_cores(config: Config) -> None:
    there = os.cpu_count() or 1
    for device in config.devices:
        for core in device.cores:
            if core >= there:
                raise StartError(
                    f"device {device.name!r} names core {core}, but this machine has cores 0 to "
                    f"{there - 1}"
                )


def _check_port(name: str, host: str, port: int) -> None:
    try:
        listen(host, port).close()
    except OSError as error:
        raise StartError(
            f"cannot listen on {error.strerror}; stop what uses it, or set server.{name}"
        ) from None


def _check_batch_folder(config: Config, base: Path) -> None:
    path = batch_folder(config, base)
    if path is not None:
        folder = BatchFolder(path)
        # A platform that was killed a moment ago may still be ending.
        folder.claim(_CLAIM_TIMEOUT_S)
        folder.release()


def _check_plans_folder(config: Config, base: Path) -> None:
    if config.rebalancing.controller == "off":
        return
    store = PlanStore(plans_folder(config, base))
    deadline = time.monotonic() + _CLAIM_TIMEOUT_S
    try:
        while not store.claim():
            if time.monotonic() > deadline:
                raise StartError(
                    f"another platform keeps its plans in {plans_folder(config, base)}: set "
                    "rebalancing.folder"
                )
            time.sleep(_POLL_S)
        store.load()
    except StoreError as error:
        raise StartError(str(error)) from None
    store.release()
