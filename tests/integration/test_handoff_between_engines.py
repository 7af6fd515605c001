"""Answers whose prompt another engine has computed are those of one engine alone."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
import uuid
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from loomserve.kvstore.server.opening import open_store
from loomserve.kvstore.server.options import StoreOptions
from loomserve.kvstore.server.server import StoreServer
from loomserve.platform.engine.core.messages import EngineStart
from loomserve.platform.front_end.engine.handoffs import Handoffs
from loomserve.platform.front_end.engine.replica_client import ReplicaSetClient
from loomserve.platform.front_end.engine.serving import ModelServing
from loomserve.platform.front_end.metrics import ContinuationMetrics
from loomserve.platform.front_end.routing import RoutingRequest
from loomserve.platform.models import catalog
from loomserve.platform.state.roles import Role
from tests.integration.served_engine import ServedEngine, engine_start, served

pytestmark = [pytest.mark.engine, pytest.mark.slow]

T = TypeVar("T")

# Of the last of its blocks of 32, the prompt fills a part.
PROMPT = [*range(1000, 1300)]
TOKENS = 32
LOCAL_PROMPT_TOKENS = 64
TIMEOUT_S = 120.0
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "minItems": 9,
}
SEEDED = {"temperature": 1.0, "seed": 11}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9}
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "logprobs": {"logprobs": 5},
    "seeded": SEEDED,
    "penalties": PENALTIES,
    "seeded with penalties": {**SEEDED, **PENALTIES, "top_p": 0.9, "logprobs": 2},
    "grammar": {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False},
    "seeded with grammar": {
        **SEEDED,
        "structured_outputs": {"json": SCHEMA},
        "ignore_eos": False,
    },
    "two answers": {"n": 2, **SEEDED},
    "minimum": {"min_tokens": 8, "stop_token_ids": [*range(0, 49152, 2)]},
    "first token only": {"max_tokens": 1, "logprobs": 1},
}


class Model:
    """The engines and the front end of a model, whose replicas have roles."""

    def __init__(self, start: EngineStart, folder: Path) -> None:
        self.engines: dict[str, ServedEngine] = {}
        self.roles: dict[str, Role] = {}
        self.asked: list[RoutingRequest] = []
        self.handed_over: list[str] = []
        self.kill_at_hand_over: str | None = None
        self._start, self._folder = start, folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._serving = ModelServing(
            "demo",
            {key: value for key, value in start.options.items() if key != "served_model_name"},
            ReplicaSetClient(
                "demo",
                self._choose,
                ContinuationMetrics(CollectorRegistry()).of("demo"),
                left=self._left,
                handoffs=Handoffs(self._role_of, LOCAL_PROMPT_TOKENS),
            ),
        )
        self.run(self._serving.start())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    @contextmanager
    def engine(self, name: str, core: int) -> Iterator[ServedEngine]:
        folder = self._folder / name
        folder.mkdir()
        address = engine_start("", folder).address
        with served(self._start.model_copy(update={"address": address}), core) as engine:
            self.engines[name] = engine
            self._set_replicas()
            self.until(lambda: name in self._serving.replicas)
            yield engine
            del self.engines[name]
            self._set_replicas()

    def _set_replicas(self) -> None:
        addresses = {name: engine.address for name, engine in self.engines.items()}

        async def tell() -> None:
            self._serving.client.set_replicas(addresses)

        self.run(tell())

    def _role_of(self, name: str) -> Role:
        return self.roles.get(name, Role.UNIFIED)

    def _choose(self, routing: RoutingRequest) -> str | None:
        self.asked.append(routing)
        # The last one that was started has what it alone can have.
        names = sorted(routing.candidates, key=[*self.engines].index)
        return next((each for each in names if self._role_of(each) is not Role.PREFILL), names[-1])

    def _left(self, routing: RoutingRequest, name: str) -> None:
        if routing.prompt_only:
            self.handed_over.append(name)
            if name == self.kill_at_hand_over:
                os.kill(self.engines[name].host.pid, signal.SIGKILL)

    def until(self, condition: Any) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < end, "it did not come to that"
            time.sleep(0.005)

    def begin(self, *bodies: dict[str, Any]) -> Any:
        """Ask all at once; the answers come from :meth:`answers`."""
        return asyncio.run_coroutine_threadsafe(self._ask_all(bodies), self._loop)

    def answers(self, *bodies: dict[str, Any]) -> list[Any]:
        answers: list[Any] = self.begin(*bodies).result(TIMEOUT_S)
        return answers

    async def _ask_all(self, bodies: Sequence[dict[str, Any]]) -> list[Any]:
        transport = httpx.ASGITransport(app=self._serving.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", timeout=TIMEOUT_S
        ) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=request(body)) for body in bodies)
            )
        for answer in answers:
            assert answer.status_code == 200, answer.text
        return [answer.json()["choices"] for answer in answers]

    def handoffs(self, outcome: str) -> float:
        return self._figure("loomserve_handoffs_total", outcome=outcome)

    def prompt_tokens(self, source: str) -> float:
        return self._figure("loomserve_handoff_tokens_total", source=source)

    def _figure(self, name: str, **labels: str) -> float:
        page = self._serving.page("decode") or ""
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == name and sample.labels == labels
        )

    def close(self) -> None:
        self.run(self._serving.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)


def request(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        # What one has computed no other finds.
        "cache_salt": uuid.uuid4().hex,
        **body,
    }


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = tmp_path_factory.mktemp("roles")
    options = StoreOptions(
        folder=folder,
        arena=Path(f"/dev/shm/loomserve-kv-roles-{uuid.uuid4().hex}"),
        memory=256 * 2**20,
    )
    source = str(catalog.resolve("demo", folder))
    start = engine_start(source, folder, kv_transfer_config=options.kv_transfer_config("demo"))
    with ExitStack() as stack:
        store = StoreServer(open_store(options), options.address)
        store.start()
        stack.callback(options.arena.unlink, missing_ok=True)
        stack.callback(store.stop)
        model = Model(start, folder)
        stack.callback(model.close)
        stack.enter_context(model.engine("decode", 1))
        stack.enter_context(model.engine("prefill", 0))
        yield model


@pytest.fixture(scope="module", name="alone")
def _alone(model: Model) -> dict[str, Any]:
    """What one engine answers."""
    model.roles = {}
    answers = dict(zip(CASES, model.answers(*CASES.values()), strict=True))
    assert model.handoffs("continued") == model.handoffs("local") == 0
    return answers


@pytest.fixture(autouse=True)
def _roles(model: Model, alone: dict[str, Any]) -> None:
    model.roles = {"prefill": Role.PREFILL, "decode": Role.DECODE}
    model.kill_at_hand_over = None


def same(ours: Any, theirs: Any) -> None:
    """See that these are the same choices."""
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our["token_ids"] == their["token_ids"]
        assert (our["text"], our["finish_reason"]) == (their["text"], their["finish_reason"])
        assert (our["logprobs"] is None) == (their["logprobs"] is None)
        if our["logprobs"] is not None:
            for key in ("token_logprobs", "top_logprobs"):
                for mine, other in zip(our["logprobs"][key], their["logprobs"][key], strict=True):
                    assert mine == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_is_that_of_one_engine(case: str, model: Model, alone: dict[str, Any]) -> None:
    before = {each: model.prompt_tokens(each) for each in ("store", "recomputed")}
    continued = model.handoffs("continued")
    (apart,) = model.answers(CASES[case])
    same(apart, alone[case])
    count = CASES[case].get("n", 1)
    assert model.handoffs("continued") == continued + count
    if case != "first token only":
        assert model.prompt_tokens("store") - before["store"] == count * len(PROMPT)
        assert model.prompt_tokens("recomputed") == before["recomputed"]


def test_all_at_once_are_those_of_one_engine(model: Model, alone: dict[str, Any]) -> None:
    for case, apart in zip(CASES, model.answers(*CASES.values()), strict=True):
        same(apart, alone[case])


def test_a_grammar_ends_an_answer_where_it_is_whole(model: Model) -> None:
    grammar = {"regex": "[0-9]{12}"}
    ((choice,),) = model.answers({"structured_outputs": grammar, "ignore_eos": False})
    assert choice["finish_reason"] == "stop"
    assert re.fullmatch("[0-9]{12}", choice["text"])


def test_a_stop_string_in_the_first_token_ends_the_answer(
    model: Model, alone: dict[str, Any]
) -> None:
    first = alone["first token only"][0]["text"]
    ((choice,),) = model.answers({"stop": [first]})
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")


def test_short_prompts_and_those_with_logprobs_stay(model: Model) -> None:
    before, passed = model.handoffs("local"), len(model.handed_over)
    model.answers({"prompt": PROMPT[:LOCAL_PROMPT_TOKENS]}, {"prompt_logprobs": 1})
    assert model.handoffs("local") == before + 2
    assert len(model.handed_over) == passed


def test_roles_change_while_prompts_are_computed(model: Model, alone: dict[str, Any]) -> None:
    cases = ["greedy", "seeded", "penalties"]
    asked = model.begin(*(CASES[case] for case in cases))
    model.until(lambda: sum(each.prompt_only for each in model.asked) >= 3)
    model.roles = {"prefill": Role.DECODE, "decode": Role.PREFILL}
    swapped = model.begin(*(CASES[case] for case in cases))
    for answers in (asked, swapped):
        for case, apart in zip(cases, answers.result(TIMEOUT_S), strict=True):
            same(apart, alone[case])


@pytest.mark.parametrize("when", ["while it computes the prompt", "while it hands over"])
def test_a_killed_prefill_engine_changes_no_answer(
    when: str, model: Model, alone: dict[str, Any]
) -> None:
    cases = ["greedy", "logprobs", "seeded with penalties"]
    before = model.handoffs("prefill_away")
    with model.engine(f"victim{len(when)}", 0) as victim:
        # The only one.
        model.roles = {f"victim{len(when)}": Role.PREFILL, "decode": Role.DECODE}
        if when == "while it hands over":
            model.kill_at_hand_over = f"victim{len(when)}"
        asked = model.begin(*(CASES[case] for case in cases))
        if when == "while it computes the prompt":
            model.until(lambda: victim.run(victim.host.stats(timeout_s=5)).running)
            os.kill(victim.host.pid, signal.SIGSTOP)
            os.kill(victim.host.pid, signal.SIGKILL)
        for case, apart in zip(cases, asked.result(TIMEOUT_S), strict=True):
            same(apart, alone[case])
    lost = model.handoffs("prefill_away") - before
    assert lost >= (2 if when == "while it computes the prompt" else 1)
