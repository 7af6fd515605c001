"""What sleep gives back of an engine's memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.e2e.conftest import COLD, Platform
from tests.e2e.test_admin import ask, model_state, wait_for

pytestmark = pytest.mark.e2e


def test_sleep_gives_memory_back_and_keeps_the_engine(platform: Platform) -> None:
    (replica,) = model_state(platform, COLD)["replicas"]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: ask_long(platform, n), range(16)))
    before = own_bytes(replica["engine_pid"])
    wait_for(lambda: fell_asleep(platform), 60)
    assert before - own_bytes(replica["engine_pid"]) > 50 * 2**20
    (asleep,) = model_state(platform, COLD)["replicas"]
    assert asleep["asleep"]
    assert (asleep["engine_pid"], asleep["id"]) == (replica["engine_pid"], replica["id"])
    assert ask(platform, COLD)


def fell_asleep(platform: Platform) -> bool:
    with platform.admin() as admin:
        return admin.post(f"/admin/v1/models/{COLD}/sleep").status_code == 200


def ask_long(platform: Platform, number: int) -> None:
    platform.client().completions.create(
        model=COLD, prompt=f"{number} " * 150, max_tokens=2, temperature=0
    )


def own_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_full_info().uss)
