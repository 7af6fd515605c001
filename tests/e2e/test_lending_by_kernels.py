"""Loans on a whole platform whose rows are carried by the kernels for GPUs.

Its devices are cores: their engines have a worker that lends as a GPU's does, with a GPU's layout
of KV, memory by the page, and kernels that Triton interprets. Tokens are in float32, and the same
wherever attention is computed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("triton", reason="Triton, which interprets the kernels, is not installed")

from loomserve.platform.placement import device_profile
from loomserve.platform.placement.policy.device_times import (
    DeviceProfile,
    MeasuredDevice,
    MeasuredLink,
)
from tests import tiny_models
from tests.e2e.conftest import CORES, Platform, server_section, started
from tests.e2e.test_admin import model_state, wait_for
from tests.e2e.test_lending import (
    BORROWER,
    LENDER,
    a_move,
    broken,
    carry_out,
    get,
    lending_state,
    loans,
    own_blocks,
    parts,
    plan_status,
    status,
    switch,
    wait_for_loan,
)
from tests.integration import tiny_llama

pytestmark = [pytest.mark.e2e, pytest.mark.xdist_group("kernels on a platform")]

ROOT = Path(__file__).parents[2]
HEAD_SIZE, BLOCK_TOKENS, CONTEXT = 32, 32, 128
BLOCK_BYTES = 2 * 2 * 2 * HEAD_SIZE * BLOCK_TOKENS * 4
"""Keys and values of two layers with two KV heads."""
OWN, LENT, ALL = 10, 16, 40
"""Blocks: the borrower's own, those that it may have with the lender, and all of the lender's,
where there is room for a head of the borrower's, too."""
TOKENS = 48
"""So many that reports, each 2 s, tell of requests that run."""
PROMPTS = [f"Tale {number}." for number in range(4)]
OWN_PROMPTS = [f"{number} times as many foxes as before. " * 2 for number in range(8)]
"""Of the lender's, which together fill all of its memory."""


def model(name: str, folder: Path, device: str, blocks: int, **lending: object) -> dict[str, Any]:
    return {
        "name": name,
        "source": str(folder),
        "devices": [device],
        "kv_cache_memory": blocks * BLOCK_BYTES,
        "engine": {
            "worker_cls": "tests.integration.interpreted_worker.InterpretedWorker",
            "dtype": "float32",
            "block_size": BLOCK_TOKENS,
            "max_model_len": CONTEXT,
            "max_num_seqs": 8,
            # Few rows, each of which the interpreter takes milliseconds for, but those of a block:
            # as much is copied at once.
            "max_num_batched_tokens": BLOCK_TOKENS,
        },
        "lending": lending,
    }


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder, weights = tmp_path_factory.mktemp("kernels"), tmp_path_factory.mktemp("model")
    # Its tokenizer, beside a model with heads to move.
    tiny_models.write("llama", weights / "llama")
    tiny_llama.save(
        weights / "llama", vocabulary=tiny_models.VOCABULARY, context=CONTEXT, head_size=HEAD_SIZE
    )
    device_profile.save(profile(), folder / "devices.yaml")

    def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        hot = {
            "borrow_memory": LENT * BLOCK_BYTES,
            # By the interpreter's times no request would start with a lender: so all do for which
            # it has room.
            "placement": "ratio",
            "lent_share": 1.0,
            "patience_ms": 20_000,
        }
        # The interpreter shares the engine's core.
        cold = {"lend_memory": 2 * LENT * BLOCK_BYTES, "tpot_budget": 1e4}
        return {
            "devices": CORES,
            "models": [
                model(LENDER, weights / "llama", "core1", ALL, **cold),
                model(BORROWER, weights / "llama", "core0", OWN, **hot),
            ],
            "rebalancing": {"folder": "plans", "profile": "devices.yaml", "settle_s": 1},
            "server": server_section(port, hashes),
        }

    with pytest.MonkeyPatch.context() as patch:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        patch.setenv("PYTHONPATH", path)
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("VLLM_KV_CACHE_LAYOUT", "LHBNC")
        # Not forked from one that imported Triton before it was to interpret: loans broke there.
        with started(folder, configured, fork=False) as running:
            yield running


def profile() -> DeviceProfile:
    """As if both cores and the way between them had been measured."""
    cores = [str(each["name"]) for each in CORES]
    return DeviceProfile(
        measured_at=datetime.now(UTC).isoformat(),
        devices=tuple(
            MeasuredDevice(
                name=name, place=name, memory=2**33, bytes_per_s=1e10, flop_per_s=1e10, itemsize=4
            )
            for name in cores
        ),
        links=tuple(
            MeasuredLink(source=a, target=b, latency_s=1e-5, bytes_per_s=1e9, measured=True)
            for a in cores
            for b in cores
            if a != b
        ),
    )


def answer(platform: Platform, prompt: str, model: str, tokens: int) -> list[int]:
    made = platform.client().completions.create(
        model=model,
        prompt=prompt,
        max_tokens=tokens,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    found = made.choices[0].model_dump()["token_ids"]
    assert len(found) == tokens
    return list(found)


@contextmanager
def asking(
    platform: Platform,
    prompts: Sequence[str] = PROMPTS,
    model: str = BORROWER,
    tokens: int = TOKENS,
) -> Iterator[list[Future[list[int]]]]:
    """All prompts at once."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        yield [pool.submit(answer, platform, each, model, tokens) for each in prompts]


def tokens_of(running: list[Future[list[int]]]) -> list[list[int]]:
    return [each.result(300) for each in running]


@pytest.fixture(scope="module")
def alone(platform: Platform) -> list[list[int]]:
    """What the borrower answers while it borrows nothing."""
    switch(platform, False)
    wait_for(lambda: not loans(platform), 90)
    with asking(platform) as running:
        found = tokens_of(running)
    switch(platform, True)
    return found


def lent_requests(platform: Platform) -> bool:
    return any(loan["requests"] for loan in loans(platform))


@contextmanager
def asking_lender(platform: Platform) -> Iterator[list[Future[list[int]]]]:
    """All prompts at once; inside, some of them run with the lender. It grants nothing for a moment
    after its own requests, when all are answered at home: then they are asked again."""
    for _ in range(20):
        wait_for(lambda: not lent_requests(platform), 60)
        wait_for_loan(platform)
        with asking(platform) as running:
            while not all(each.done() for each in running):
                if lent_requests(platform):
                    yield running
                    return
                time.sleep(0.1)
    pytest.fail(f"no request starts with the lender; there is {lending_state(platform)}")


def tasks(platform: Platform) -> float:
    return platform.metric("loomserve_lending_tasks_total", model=BORROWER)


def test_requests_that_start_with_a_lender_are_answered_by_kernels_as_at_home(
    platform: Platform, alone: list[list[int]]
) -> None:
    wait_for_loan(platform)
    before = tasks(platform)
    with asking_lender(platform) as running:
        assert tokens_of(running) == alone
    wait_for(lambda: tasks(platform) > before, 10)
    (lent,) = lending_state(platform)["lent"]
    assert lent["borrower"] == BORROWER
    assert lent["tasks"] > 0


def given_back(platform: Platform) -> float:
    """Blocks that were asked for and came in time, and loans that ended as they did not."""
    blocks = sum(each["taken_back_blocks"] for each in lending_state(platform)["lent"])
    return blocks + broken(platform)


def test_memory_that_the_lender_needs_comes_back_while_requests_are_there(
    platform: Platform, alone: list[list[int]]
) -> None:
    wait_for_loan(platform)
    before = given_back(platform)
    with asking_lender(platform) as theirs:
        with asking(platform, OWN_PROMPTS, LENDER) as running:
            meanwhile = tokens_of(running)
        assert tokens_of(theirs) == alone
    wait_for(lambda: given_back(platform) > before, 10)
    wait_for_loan(platform)
    with asking(platform, OWN_PROMPTS, LENDER) as running:
        assert tokens_of(running) == meanwhile


def test_a_head_leaves_by_a_plan_makes_room_and_comes_home(
    platform: Platform, alone: list[list[int]]
) -> None:
    wait_for_loan(platform)
    wait_for(lambda: not get(platform, "rebalancing")["flaws"], 120)
    own = own_blocks(platform)
    with asking(platform) as running:
        plan = carry_out(platform, a_move(platform, kind="heads", amount=1))
        assert tokens_of(running) == alone
    wait_for(lambda: parts(platform) == ["away"], 60)
    assert own_blocks(platform) == 2 * own
    # One plan at a time, and this one is measured yet.
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)
    with asking(platform) as running:
        plan = carry_out(platform, a_move(platform, kind="heads", amount=1, back=True))
        assert tokens_of(running) == alone
    wait_for(lambda: not parts(platform), 60)
    assert own_blocks(platform) == own
    wait_for(lambda: plan_status(platform, plan)[0] == "done", 120)


def test_a_lender_that_is_killed_costs_no_token_and_lends_again(
    platform: Platform, alone: list[list[int]]
) -> None:
    name = wait_for_loan(platform)["name"]
    before = broken(platform)
    state = model_state(platform, LENDER)
    assert state is not None
    (replica,) = state["replicas"]
    with asking_lender(platform) as running:
        psutil.Process(replica["engine_pid"]).kill()
        assert tokens_of(running) == alone
    wait_for(lambda: broken(platform) == before + 1, 30)
    wait_for(lambda: status(platform, LENDER) == "ready", 240)
    # Reports may still tell of the one that broke.
    wait_for(
        lambda: any(each["usable_blocks"] and each["name"] != name for each in loans(platform)), 120
    )
