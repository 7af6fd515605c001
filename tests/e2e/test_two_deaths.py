"""Any two of the platform's processes are killed: nothing is left of them, and all comes back."""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.e2e.conftest import HOT, Platform, lives, platform_config, started, wait_ready
from tests.e2e.test_admin import ask, model_state, wait_for
from tests.e2e.test_leftovers import of_run, run_of
from tests.e2e.test_two_gateways import listens
from tests.forks import descendants

pytestmark = pytest.mark.e2e

# What a busy machine may take; on a quiet one nothing is left after some seconds.
GONE_S = 120
WHOLE_S = 480
# Ray starts and ends these by itself.
SPARE = "ray::IDLE"
VICTIMS = (
    "fork server", "replica", "engine", "engines", "gateway", "controller", "store", "lane"
)  # fmt: skip
# What ends with each that is killed.
WITH = {"engine": {"replica"}, "engines": {"engine", "replica"}}
PAIRS = list(permutations(VICTIMS, 2))
# Each process is once the first to be killed, and once the second.
QUICK = {*zip(VICTIMS, (*VICTIMS[1:], VICTIMS[0]), strict=True)}


def config(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
    made = platform_config(port, hashes)
    made["models"] = [model for model in made["models"] if model["name"] == HOT]
    del made["rebalancing"], made["batch"]["offline_models"]
    return made


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """In the place of the one that other tests share."""
    with started(tmp_path_factory.mktemp("deaths"), config, fork=False) as running:
        wait_for(lambda: all_there(running), WHOLE_S)
        yield running


def run_folder(platform: Platform) -> str:
    (folder,) = {run_of(child) for child in descendants(platform.process)} - {None}
    return folder


def title(process: psutil.Process) -> str:
    """What lists of processes call it; empty once it has ended.

    Ray adds what an actor is just doing.
    """
    try:
        name = process.cmdline()[0] if lives(process) else ""
        return name.partition(".")[0] if name.startswith("ray::") else name
    except (psutil.NoSuchProcess, IndexError):
        return ""


def found(platform: Platform) -> dict[str, psutil.Process]:
    """The processes that there are now, of the kinds that are killed."""
    port = int(platform.url.rpartition(":")[2])
    there = {}
    for process in of_run(run_folder(platform)):
        name = title(process)
        if name == "VLLM::ForkServer":
            there["fork server"] = process
        elif "BatchLane" in name:
            there["lane"] = process
        elif name == "ray::StoreActor":
            there["store"] = process
        elif "loomserve-engines" in name:
            there["engines"] = process
        elif "loomserve-controller" in name:
            there["controller"] = process
        elif name and listens(process, port):
            there["gateway"] = process
    with suppress(httpx.HTTPError, KeyError):
        replica = model_state(platform, HOT)["replicas"][0]
        if replica["pid"] != there["engines"].pid:  # Serve's own may come later than the engine
            there["replica"] = psutil.Process(replica["pid"])
        there["engine"] = psutil.Process(replica["engine_pid"])
    return there


def all_there(platform: Platform) -> bool:
    try:
        return set(VICTIMS) == set(found(platform))
    except (psutil.NoSuchProcess, IndexError, TypeError):
        return False


def kinds(platform: Platform) -> Counter[str]:
    titles = map(title, of_run(run_folder(platform)))
    return Counter(each for each in titles if each not in ("", SPARE))


def dead_sockets(platform: Platform) -> list[str]:
    folder = Path(run_folder(platform))
    return [
        path.name
        for part in ("sockets", "tmp")
        for path in (folder / part).iterdir()
        if path.is_socket() and refuses(path)
    ]


def refuses(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asked:
        try:
            asked.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:  # it is of another kind, or has gone
            return False
    return False


def answers(platform: Platform) -> bool:
    try:
        return bool(ask(platform, HOT))
    except openai.APIError:
        return False


def works(platform: Platform) -> bool:
    """All that serves requests of some kind answers one."""
    try:
        with platform.http() as http, platform.admin() as admin:
            said = (http.get("/v1/batches"), admin.get("/admin/v1/kv"), admin.get("/ready"))
        return all(each.status_code == 200 for each in said) and answers(platform)
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(*pair, marks=[] if pair in QUICK else pytest.mark.slow, id=" then ".join(pair))
        for pair in PAIRS
    ],
)
def test_nothing_is_left_of_two_that_were_killed_and_all_comes_back(
    first: str, second: str, platform: Platform, record_property: Callable[[str, object], None]
) -> None:
    there, before = found(platform), kinds(platform)
    began = time.monotonic()

    def told(what: str) -> None:
        record_property(what, round(time.monotonic() - began, 1))

    for victim in (first, second):
        with suppress(psutil.NoSuchProcess):  # the first has taken it along
            there[victim].kill()
        time.sleep(0.2)
    gone = {first, second}.union(*(WITH.get(each, ()) for each in (first, second)))
    wait_for(lambda: not any(lives(there[each]) for each in gone), GONE_S)
    told("processes gone")
    wait_for(lambda: answers(platform), WHOLE_S)
    told("answers")
    wait_for(lambda: not dead_sockets(platform), GONE_S, lambda: dead_sockets(platform))
    told("sockets gone")
    wait_for(lambda: all_there(platform) and works(platform), WHOLE_S, lambda: found(platform))
    wait_ready(platform)
    told("whole")
    wait_for(lambda: kinds(platform) == before, GONE_S, lambda: kinds(platform) - before)
    told("as before")
    now = found(platform)
    assert all(now[each] != there[each] for each in gone)
