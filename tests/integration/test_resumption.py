"""An answer goes on in another engine as if nothing had happened, whatever shapes it."""

from __future__ import annotations

import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.engine import running_store
from loomserve.platform.engine.process import engine_process
from loomserve.platform.models import catalog
from tests.integration.served_engine import (
    BareClient,
    ServedEngine,
    Stream,
    answers,
    connected,
    engine_start,
    pump_until,
    served,
)

pytestmark = pytest.mark.engine

TOKENS = 48
PROMPT = list(range(1000, 1100))
SCHEMA = {
    "type": "array",
    "items": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
    "minItems": 9,
}
SEEDED = {"temperature": 1.0, "seed": 11}
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.6, "frequency_penalty": 0.9}

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"ignore_eos": True},
    "logprobs": {"ignore_eos": True, "logprobs": 5},
    "seeded": {**SEEDED, "ignore_eos": True},
    "seeded, top p and k": {**SEEDED, "top_p": 0.9, "top_k": 50, "ignore_eos": True},
    "penalties": {**PENALTIES, "ignore_eos": True},
    "seeded with penalties": {**SEEDED, **PENALTIES, "ignore_eos": True},
    "grammar": {"schema": SCHEMA},
    "seeded with grammar": {**SEEDED, "schema": SCHEMA},
    "logit bias": {**SEEDED, "logit_bias": {1000: 8.0, 2000: 8.0}, "ignore_eos": True},
    "prompt logprobs": {"ignore_eos": True, "prompt_logprobs": 1, "logprobs": 1},
}


@pytest.fixture(scope="module", name="client")
def _client(served_engine: ServedEngine) -> Iterator[BareClient]:
    with connected(served_engine.address) as client:
        yield client


def salt() -> str:
    """KV is shared with nobody: all is computed anew."""
    return uuid.uuid4().hex


def went_on(client: BareClient, whole: Stream, after: list[int], **params: Any) -> None:
    """See that the answer goes on in the same way after each of these numbers of tokens."""
    after = [count for count in after if count < len(whole.tokens)]
    assert len(after) >= 2, "the answer is too short to tell"
    names = [client.add(PROMPT, whole.tokens[:count], salt=salt(), **params) for count in after]
    for count, rest in zip(after, answers(client, names), strict=True):
        assert rest.tokens == whole.tokens[count:], f"after {count}"
        assert rest.finish == whole.finish
        assert rest.prefills == 0, "its prefill is told once"
        assert rest.events[:1] == [2], "scheduled, and not queued"
        assert len(rest.logprobs) == len(whole.logprobs[count:])
        for ours, theirs in zip(rest.logprobs, whole.logprobs[count:], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_an_answer_goes_on_as_it_would_have(case: str, client: BareClient) -> None:
    params = CASES[case]
    (whole,) = answers(client, [client.add(PROMPT, salt=salt(), **params)])
    assert whole.prefills == 1
    assert len(whole.tokens) == TOKENS or not params.get("ignore_eos")
    went_on(client, whole, [1, 10, 40], **params)


def test_an_answer_stops_where_it_would_have(client: BareClient) -> None:
    # A fourth of all tokens would be the last, were there not a least number: whatever the noise
    # that a version of vLLM draws of a seed, one of them comes soon.
    params = {"stop_token_ids": list(range(0, 49152, 4)), "min_tokens": 20, **SEEDED}
    (whole,) = answers(client, [client.add(PROMPT, salt=salt(), **params)])
    assert 20 <= len(whole.tokens) < TOKENS
    assert whole.finish == "stop"
    went_on(client, whole, [1, 10, 19], **params)


def test_kv_is_looked_up_over_the_prompt_and_the_tokens_so_far(client: BareClient) -> None:
    shared = salt()
    (whole,) = answers(client, [client.add(PROMPT, salt=shared, ignore_eos=True)])
    before = client.preempted_hits
    name = client.add(PROMPT, whole.tokens[:40], salt=shared, ignore_eos=True)
    (rest,) = answers(client, [name])
    assert rest.tokens == whole.tokens[40:]
    # Four blocks of 32 tokens, of which the last holds tokens of the answer.
    assert client.preempted_hits - before == 128


@pytest.mark.parametrize("tokens", [[49152], "text", [1] * TOKENS])
def test_nonsense_ends_its_request_and_nothing_else(tokens: Any, client: BareClient) -> None:
    other = client.add(PROMPT, max_tokens=8, ignore_eos=True)
    refused = client.add(PROMPT, tokens)
    ended, fine = answers(client, [refused, other])
    assert (ended.finish, ended.tokens) == ("error", [])
    assert len(fine.tokens) == 8


def test_tokens_that_break_the_grammar_end_the_request(client: BareClient) -> None:
    other = client.add(PROMPT, ignore_eos=True)
    refused = client.add(PROMPT, [1000, 1001], schema=SCHEMA)
    ended, fine = answers(client, [refused, other])
    assert ended.finish == "error"
    assert len(fine.tokens) == TOKENS


def test_the_kv_store_has_what_another_engine_has_computed(tmp_path: Path) -> None:
    model = str(catalog.resolve("demo", tmp_path))
    params: dict[str, Any] = {**SEEDED, "ignore_eos": True}
    with running_store(tmp_path, 64 * 2**20) as store:
        start = engine_start(model, tmp_path, kv_transfer_config=store.kv_transfer_config("demo"))
        with served(start) as engine, connected(engine.address) as client:
            (whole,) = answers(client, [client.add(PROMPT, **params)])
            cut = client.streams[client.add(PROMPT, salt="cut", **params)]
            pump_until(lambda: len(cut.tokens) >= 40, client)
            os.kill(engine.host.pid, signal.SIGKILL)
        assert cut.finish is None
        start = start.model_copy(update={"address": engine_start(model, tmp_path).address})
        with served(start) as engine, connected(engine.address) as client:
            name = client.add(PROMPT, whole.tokens[:40], **params)
            (rest,) = answers(client, [name])
            assert rest.tokens == whole.tokens[40:]
            # Of an answer that has ended, full blocks.
            assert client.stored_hits == 128
            name = client.add(PROMPT, cut.tokens, salt="cut", **params)
            (rest,) = answers(client, [name])
            assert cut.tokens + rest.tokens == whole.tokens
            # The last block was saved whenever another fourth of it was filled.
            computed = len(PROMPT) + len(cut.tokens) - 1
            assert client.stored_hits - 128 == computed // 8 * 8


@pytest.mark.slow
def test_an_answer_goes_on_with_a_step_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_CHILD", "tests.integration.asynchronous_child")
    start = engine_start(str(catalog.resolve("demo", tmp_path)), tmp_path)
    with served(start) as engine, connected(engine.address) as client:
        for case in ("logprobs", "seeded with penalties", "seeded with grammar"):
            params = CASES[case]
            (whole,) = answers(client, [client.add(PROMPT, salt=salt(), **params)])
            went_on(client, whole, [1, 10, 40], **params)


@pytest.mark.slow
def test_an_answer_goes_on_with_workers_of_their_own_process(tmp_path: Path) -> None:
    start = engine_start(str(catalog.resolve("demo", tmp_path)), tmp_path)
    start = start.model_copy(update={"own_process_workers": True})
    with served(start) as engine, connected(engine.address) as client:
        assert psutil.Process(engine.host.pid).children()
        params = CASES["seeded with penalties"]
        (whole,) = answers(client, [client.add(PROMPT, salt=salt(), **params)])
        went_on(client, whole, [1, 10, 40], **params)
