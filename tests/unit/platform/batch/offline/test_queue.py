"""Lines in static batches with a process that is a table: each is answered once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from loomserve.platform.access.live_keys import LiveKeys
from loomserve.platform.base.errors import BadRequest
from loomserve.platform.batch.executor import LineAnswer, LineCall, LineOutcome
from loomserve.platform.batch.executors import CombinedExecutor
from loomserve.platform.batch.offline import queue
from loomserve.platform.batch.offline.queue import OfflineQueue
from loomserve.platform.batch.offline.worker import (
    OfflineAnswer,
    OfflineFacts,
    OfflineLine,
    WorkerGoneError,
)
from loomserve.platform.config import ApiKey, Batching, Server
from tests.waiting import PATIENCE_S

TOKEN_BYTES = 10
KV_BYTES = 5000  # 500 tokens, of which plans take 400


def call(name: str, expected: float = 10, attempts: int = 0, **body: Any) -> LineCall:
    return LineCall(
        owner="",
        path="/v1/completions",
        body={"model": "m", "prompt": name, **body},
        request_id=name,
        model="m",
        engine="offline:m",
        left_s=3600.0,
        expected_tokens=lambda: expected,
        attempts=attempts,
    )


class Process:
    """Prompts have ten tokens; a batch is answered, or whatever ``behave`` does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.dead = False

    async def facts(self) -> OfflineFacts:
        self._check()
        return OfflineFacts(1024, TOKEN_BYTES)

    async def prompt_tokens(self, line: OfflineLine) -> int:
        await asyncio.sleep(0)
        self._check()
        if line.body.get("logprobs"):
            raise BadRequest("no logprobs", param="logprobs")
        return 10

    async def run(self, lines: Sequence[OfflineLine]) -> Sequence[OfflineAnswer] | None:
        names = [line.id for line in lines]
        self._world.batches.append(names)
        await self._world.may_end.wait()
        self._check()
        answers = self._world.behave(self, names)
        self._check()
        return answers

    async def leave(self, line_id: str) -> None:
        self._check()
        self._world.left.append(line_id)

    def stop(self) -> None:
        self.dead = True

    def _check(self) -> None:
        if self.dead:
            raise WorkerGoneError("killed")


def good(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
    return [OfflineAnswer(json.dumps({"to": name}).encode(), 5) for name in names]


class World:
    def __init__(
        self, behave: Callable[[Process, list[str]], list[OfflineAnswer] | None] = good
    ) -> None:
        self.behave = behave
        self.batches: list[list[str]] = []
        self.left: list[str] = []
        self.processes: list[Process] = []
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.queue = OfflineQueue("m", self.start, KV_BYTES, places=50)

    def start(self) -> Process:
        self.processes.append(Process(self))
        return self.processes[-1]

    async def ask(self, *calls: LineCall) -> list[LineAnswer]:
        return await asyncio.gather(*map(self.queue.execute, calls))

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(world: World) -> Any:
    task = asyncio.create_task(world.queue.run())
    await world.until(lambda: world.queue.model.places > 0)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_GATHER_S", "_RESTART_S"):
        monkeypatch.setattr(queue, name, 0.01)


def test_lines_that_come_together_run_together_as_far_as_memory_is_planned_for_them() -> None:
    async def scenario() -> None:
        world = World()
        assert world.queue.model.places == 0
        async with running(world):
            assert world.queue.model.max_model_len == 1024
            # 20 tokens of prompt and answer each: 400 hold twenty.
            answers = await world.ask(*(call(f"{n}") for n in range(30)))
        assert [json.loads(one.body)["to"] for one in answers] == [f"{n}" for n in range(30)]
        assert {(one.outcome, one.status) for one in answers} == {(LineOutcome.ANSWERED, 200)}
        assert sorted(map(len, world.batches)) == [10, 20]

    asyncio.run(scenario())


def test_answers_of_like_predicted_length_share_a_batch() -> None:
    async def scenario() -> None:
        world = World()
        async with running(world):
            long, short = [call(f"l{n}", 90) for n in range(4)], [call(f"s{n}") for n in range(4)]
            await world.ask(*(one for pair in zip(long, short, strict=True) for one in pair))
        assert sorted(map(sorted, world.batches)) == [
            ["l0", "l1", "l2", "l3"],
            ["s0", "s1", "s2", "s3"],
        ]

    asyncio.run(scenario())


POLICIES = [
    Batching(policy="wma"),
    Batching(policy="slo_odbs"),
    Batching(policy="slo_dbs", next="oldest"),
    Batching(policy="odbs", next="hrrn"),
    Batching(policy="fifo", size=3),
]


async def batches_by(rules: Batching, *calls: LineCall) -> list[list[str]]:
    """What runs together, in the order of the batches, of lines that have all come."""
    world = World()
    world.queue = OfflineQueue("m", world.start, KV_BYTES, places=50, rules=rules)
    async with running(world):
        world.may_end.clear()
        blocker = asyncio.create_task(world.queue.execute(call("blocker")))
        await world.until(lambda: world.batches == [["blocker"]])
        asked = asyncio.create_task(world.ask(*calls))
        await asyncio.sleep(0.05)
        world.may_end.set()
        answers = await asyncio.gather(blocker, asked)
    assert [json.loads(one.body)["to"] for one in answers[1]] == [one.request_id for one in calls]
    return world.batches[1:]


@pytest.mark.parametrize("rules", POLICIES, ids=lambda rules: rules.policy)
def test_by_each_policy_every_line_is_answered_once(rules: Batching) -> None:
    lengths = [10, 380, 40, 90, 390, 5, 10]
    calls = [call(f"{at}", length) for at, length in enumerate(lengths)]
    batches = asyncio.run(batches_by(rules, *calls))
    assert sorted(name for batch in batches for name in batch) == [one.request_id for one in calls]


def test_the_policy_is_the_configurations() -> None:
    lines = [call("a", 50), call("b", 5), call("c", 50), call("d", 5), call("e", 50)]

    def batches(**rules: Any) -> list[list[str]]:
        return asyncio.run(batches_by(Batching(**rules), *lines))

    assert batches(policy="fifo", size=2) == [["a", "b"], ["c", "d"], ["e"]]
    # A short answer waits for a long one for 45 tokens, and reads some 40 again each time.
    assert batches(policy="wma", most_waste=1_000) == [["a", "c", "e"], ["b", "d"]]
    assert batches(policy="wma", most_waste=100_000) == [["a", "b", "c", "d", "e"]]


def test_deadlines_are_the_ends_of_windows() -> None:
    lines = [
        call(f"{hours} h").model_copy(update={"left_s": 3600.0 * hours}) for hours in (24, 1, 3, 2)
    ]

    def batches(**rules: Any) -> list[list[str]]:
        return asyncio.run(batches_by(Batching(**rules), *lines))

    by_deadline = ["1 h", "2 h", "3 h", "24 h"]
    assert batches(policy="slo_odbs") == [by_deadline]
    # Of two lines: twice the 3,600 s and the 7,200 s, a tenth of a token each.
    assert batches(policy="odbs", slo_weight=0.1, threshold=2_200) == [
        ["1 h", "2 h"],
        ["3 h"],
        ["24 h"],
    ]


def test_who_runs_together_follows_what_is_known_of_lengths_by_then() -> None:
    expected = 390.0  # as much as there is for any alone

    async def scenario() -> None:
        nonlocal expected
        world = World()
        async with running(world):
            world.may_end.clear()
            blocker = asyncio.create_task(world.queue.execute(call("blocker")))
            await world.until(lambda: world.batches == [["blocker"]])
            update = {"expected_tokens": lambda: expected}
            calls = [call(f"{n}").model_copy(update=update) for n in range(6)]
            asked = [asyncio.create_task(world.queue.execute(one)) for one in calls]
            await asyncio.sleep(0.05)
            expected = 20.0
            world.may_end.set()
            await asyncio.gather(blocker, *asked)
        assert [len(batch) for batch in world.batches] == [1, 6]

    asyncio.run(scenario())


def test_a_batch_that_runs_out_of_memory_is_split_until_each_line_has_its_answer() -> None:
    def behave(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
        return good(process, names) if len(names) < 3 else None

    async def scenario() -> None:
        world = World(behave)
        async with running(world):
            answers = await world.ask(*(call(f"{n}") for n in range(9)))
        assert all(one.status == 200 for one in answers)
        state = world.queue.state
        assert state.batches == sum(len(batch) < 3 for batch in world.batches)
        assert state.splits == len(world.batches) - state.batches
        answered = Counter(name for batch in world.batches if len(batch) < 3 for name in batch)
        assert answered == Counter(f"{n}" for n in range(9))

    asyncio.run(scenario())


def test_a_line_that_never_fits_is_told_so_and_the_others_go_on() -> None:
    def behave(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
        return None if "huge" in names else good(process, names)

    async def scenario() -> None:
        world = World(behave)
        async with running(world):
            huge, *others = await world.ask(call("huge"), call("a"), call("b"))
        assert (huge.outcome, huge.status) == (LineOutcome.ANSWERED, 400)
        assert json.loads(huge.body)["error"]["code"] == "kv_memory_exceeded"
        assert all(one.status == 200 for one in others)

    asyncio.run(scenario())


def test_what_the_model_does_not_answer_is_refused_before_it_waits() -> None:
    async def scenario() -> None:
        world = World()
        async with running(world):
            [refused] = await world.ask(call("a", logprobs=3))
        assert (refused.outcome, refused.status) == (LineOutcome.ANSWERED, 400)
        assert json.loads(refused.body)["error"]["param"] == "logprobs"
        assert not world.batches

    asyncio.run(scenario())


def test_a_killed_process_costs_its_batch_an_attempt_and_those_that_wait_nothing() -> None:
    async def scenario() -> None:
        world = World()
        async with running(world):
            world.may_end.clear()
            asked = [asyncio.create_task(world.queue.execute(call(f"{n}"))) for n in range(30)]
            await world.until(lambda: len(world.batches) == 1)
            [batch] = world.batches
            world.processes[0].dead = True
            world.may_end.set()
            answers = dict(
                zip((f"{n}" for n in range(30)), await asyncio.gather(*asked), strict=True)
            )
        failed = {name for name, one in answers.items() if one.outcome is LineOutcome.ENGINE_ENDED}
        assert failed == set(batch)
        assert len(world.processes) == 2
        assert all(answers[name].status == 200 for name in answers.keys() - failed)

    asyncio.run(scenario())


def test_a_line_that_kills_its_process_takes_others_with_it_once_only() -> None:
    def behave(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
        process.dead = "poison" in names
        return good(process, names)

    async def until_answered(world: World, name: str) -> tuple[str, int]:
        attempts = 0
        while attempts < 3:
            said = await world.queue.execute(call(name, attempts=attempts))
            attempts += said.outcome is LineOutcome.ENGINE_ENDED
            if said.outcome is LineOutcome.ANSWERED:
                break
            await asyncio.sleep(0.01)
        return name, attempts

    async def scenario() -> None:
        world = World(behave)
        async with running(world):
            names = ("poison", "a", "b", "c")
            found = dict(await asyncio.gather(*(until_answered(world, name) for name in names)))
        assert found["poison"] == 3
        assert max(found[name] for name in "abc") <= 1

    asyncio.run(scenario())


def test_a_process_that_dies_while_it_is_idle_is_started_again() -> None:
    async def scenario() -> None:
        world = World()
        async with running(world):
            world.processes[0].dead = True
            [away] = await world.ask(call("a"))
            assert away.outcome is LineOutcome.AWAY
            await world.until(lambda: world.queue.state.problem is not None)
            assert not world.queue.state.ready
            await world.until(lambda: world.queue.model.places > 0)
            [answer] = await world.ask(call("a"))
            assert answer.status == 200
            assert (world.queue.state.ready, world.queue.state.problem) == (True, None)
        assert all(process.dead for process in world.processes)

    asyncio.run(scenario())


def test_a_cancelled_line_leaves_the_queue_or_its_batch() -> None:
    async def scenario() -> None:
        world = World()
        async with running(world):
            world.may_end.clear()
            first = asyncio.create_task(world.queue.execute(call("first")))
            await world.until(lambda: world.batches == [["first"]])
            waits = asyncio.create_task(world.queue.execute(call("waits")))
            stays = asyncio.create_task(world.queue.execute(call("stays")))
            await asyncio.sleep(0.05)
            for task in (first, waits):
                task.cancel()
            await asyncio.gather(first, waits, return_exceptions=True)
            assert "first" in world.left
            world.may_end.set()
            assert (await stays).status == 200
        assert world.batches == [["first"], ["stays"]]

    asyncio.run(scenario())


def test_a_cancelled_line_of_a_batch_that_ran_out_of_memory_is_in_neither_half() -> None:
    def behave(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
        return None if len(names) == 4 else good(process, names)

    async def scenario() -> None:
        world = World(behave)
        async with running(world):
            world.may_end.clear()
            asked = {name: asyncio.create_task(world.queue.execute(call(name))) for name in "abcd"}
            await world.until(lambda: len(world.batches) == 1)
            asked["a"].cancel()
            await asyncio.gather(asked["a"], return_exceptions=True)
            world.may_end.set()
            answers = await asyncio.gather(*(asked[name] for name in "bcd"))
        assert all(one.status == 200 for one in answers)
        assert sorted(name for batch in world.batches[1:] for name in batch) == ["b", "c", "d"]

    asyncio.run(scenario())


def test_once_batches_are_measured_a_short_one_overtakes_a_long_one() -> None:
    now = 0.0

    def behave(process: Process, names: list[str]) -> list[OfflineAnswer] | None:
        nonlocal now
        slow = names[0].startswith("slow")
        now += 100.0 if slow else 1.0
        return [OfflineAnswer(b"{}", 300 if slow else 5) for _ in names]

    async def scenario() -> None:
        nonlocal now
        world = World(behave)
        world.queue = OfflineQueue("m", world.start, KV_BYTES, places=50, clock=lambda: now)
        async with running(world):
            for name in ("quick", "slow-1", "slow-2"):
                await world.ask(call(name))
            world.may_end.clear()
            blocker = asyncio.create_task(world.queue.execute(call("blocker")))
            await world.until(lambda: world.batches[-1] == ["blocker"])
            asked = []
            for name, expected in (("long", 300), ("short", 5)):
                asked.append(asyncio.create_task(world.queue.execute(call(name, expected))))
                await asyncio.sleep(0.02)
                now += 1
            world.may_end.set()
            await asyncio.gather(blocker, *asked)
        assert world.batches[-2:] == [["short"], ["long"]]

    asyncio.run(scenario())


def test_a_offline_models_lines_need_a_key_that_may_use_it_and_others_go_to_engines() -> None:
    class Engines:
        async def models(self) -> Any:
            return {"vllm": "its engines"}

        async def execute(self, call: LineCall) -> LineAnswer:
            return LineAnswer(LineOutcome.ANSWERED, 299, b"{}")

    def key(name: str, *models: str) -> ApiKey:
        digest = "sha256:" + f"{len(name):064d}"
        return ApiKey(name=name, hash=digest, models=models)

    def of(owner: str, model: str = "m") -> LineCall:
        update = {"owner": owner, "body": {"model": model}, "model": model, "engine": None}
        return call(owner).model_copy(update=update)

    async def scenario() -> None:
        world = World()
        keys = LiveKeys(Server(api_keys=(key("any"), key("other", "vllm"), key("this-one", "m"))))
        several = CombinedExecutor(Engines(), {"m": world.queue}, keys)
        async with running(world):
            assert await several.models() == {"vllm": "its engines", "m": world.queue.model}
            found = {
                owner: (await several.execute(of(owner))).status
                for owner in ("any", "other", "this-one", "gone")
            }
            assert found == {"any": 200, "other": 403, "this-one": 200, "gone": 403}
            assert (await several.execute(of("other", "vllm"))).status == 299
            keys.problem = "the file is wrong"
            assert (await several.execute(of("gone"))).outcome is LineOutcome.AWAY

    asyncio.run(scenario())
