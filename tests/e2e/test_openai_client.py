"""The API as its users meet it: the openai client and one unmodified third-party client."""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from langchain_openai import ChatOpenAI

from tests.e2e.conftest import CLIENTS_TIMEOUT, COLD, HOT, Platform
from tests.e2e.test_admin import model_state, wait_for

pytestmark = pytest.mark.e2e
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]


def test_both_models_answer_at_once(platform: Platform) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{platform.url}/v1",
            api_key=platform.key,
            max_retries=0,
            timeout=CLIENTS_TIMEOUT,
        ) as client:
            answers = await asyncio.gather(
                *(
                    client.chat.completions.create(
                        model=model, messages=CAPITAL, max_tokens=16, temperature=0
                    )
                    for model in (HOT, COLD) * 3
                )
            )
        return [answer.choices[0].message.content for answer in answers]

    answers = asyncio.run(ask())
    assert len(answers) == 6
    assert all("Paris" in answer for answer in answers)


def test_all_other_endpoints_answer(platform: Platform) -> None:
    said = platform.client().responses.create(model=HOT, input="Say hello.", max_output_tokens=16)
    assert said.output_text
    message = {"model": HOT, "messages": CAPITAL, "max_tokens": 16, "temperature": 0}
    text = {"model": HOT, "prompt": "Hello there"}
    with platform.http() as http:
        answer = http.post("/v1/messages", json=message).raise_for_status().json()
        assert "Paris" in answer["content"][0]["text"]
        tokens = http.post("/v1/tokenize", json=text).raise_for_status().json()["tokens"]
        again = http.post("/v1/detokenize", json={"model": HOT, "tokens": tokens})
        assert again.raise_for_status().json() == {"prompt": text["prompt"]}


def test_a_response_counts_from_its_first_token_on_of_which_its_stream_tells_before(
    platform: Platform,
) -> None:
    metric = "loomserve_time_to_first_token_seconds"
    count, total = (platform.metric(f"{metric}_{of}", model=HOT) for of in ("count", "sum"))
    came: dict[str, float] = {}
    # A prompt that no cache has takes its time.
    asked = f"{time.time()} " + "and then there was another one " * 60
    for event in platform.client().responses.create(
        model=HOT, input=asked, max_output_tokens=8, stream=True
    ):
        came.setdefault(event.type, time.monotonic())
    wait_for(lambda: platform.metric(f"{metric}_count", model=HOT) == count + 1, 10)
    told = platform.metric(f"{metric}_sum", model=HOT) - total
    until_first = came["response.output_text.delta"] - came["response.created"]
    assert told > until_first / 2


def test_models_are_listed_and_retrieved(platform: Platform) -> None:
    client = platform.client()
    assert {model.id for model in client.models.list()} == {HOT, COLD}
    assert client.models.retrieve(COLD).id == COLD
    with pytest.raises(openai.NotFoundError, match="smollm2-135m-8k"):
        client.models.retrieve("gpt-9")


@pytest.mark.claim("openai")
def test_a_stream_carries_the_same_tokens_as_the_whole_answer_and_ends_with_usage(
    platform: Platform,
) -> None:
    client = platform.client()
    whole = client.chat.completions.create(
        model=HOT, messages=CAPITAL, max_tokens=24, temperature=0
    )
    chunks = list(
        client.chat.completions.create(
            model=HOT,
            messages=CAPITAL,
            max_tokens=24,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    # What of the prompt was cached differs from one time to the next.
    assert chunks[-1].usage.model_dump(exclude={"prompt_tokens_details"}) == (
        whole.usage.model_dump(exclude={"prompt_tokens_details"})
    )


def test_stop_cuts_the_answer(platform: Platform) -> None:
    answer = platform.client().completions.create(
        model=HOT, prompt="One, two, three, four,", max_tokens=32, temperature=0, stop=[","]
    )
    assert "," not in answer.choices[0].text
    assert answer.choices[0].finish_reason == "stop"


def test_n_and_logprobs_give_as_many_as_asked(platform: Platform) -> None:
    answer = platform.client().chat.completions.create(
        model=HOT, messages=CAPITAL, max_tokens=4, n=3, logprobs=True, top_logprobs=2
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 4
        assert all(len(token.top_logprobs) >= 2 for token in choice.logprobs.content)


def test_structured_output_obeys_its_schema(platform: Platform) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    answer = platform.client().chat.completions.create(
        model=HOT,
        messages=[{"role": "user", "content": "Describe Paris as JSON with city and big."}],
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"city", "big"}
    assert isinstance(value["big"], bool)


def test_a_forced_tool_is_called_with_valid_arguments(platform: Platform) -> None:
    tool = {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            # Of other tools vLLM 0.32 lets the arguments be any JSON.
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"unit": {"type": "string", "enum": ["C", "F"]}},
                "required": ["unit"],
            },
        },
    }
    answer = platform.client().chat.completions.create(
        model=HOT,
        messages=[{"role": "user", "content": "How warm is it in Paris?"}],
        tools=[tool],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
        temperature=0,
    )
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    assert json.loads(call.arguments)["unit"] in {"C", "F"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_a_deadline_is_answered_as_any_other(
    platform: Platform, stream: bool
) -> None:
    options = {"model": HOT, "max_tokens": 8, "temperature": 0, "stream": stream}

    def texts(**headers: str) -> list[str]:
        client = platform.client()
        chat = client.chat.completions.create(messages=CAPITAL, extra_headers=headers, **options)
        plain = client.completions.create(prompt="Once", extra_headers=headers, **options)
        if not stream:
            return [chat.choices[0].message.content, plain.choices[0].text]
        return [
            "".join(chunk.choices[0].delta.content or "" for chunk in chat),
            "".join(chunk.choices[0].text for chunk in plain),
        ]

    before = platform.metric("loomserve_slo_met_total", model=HOT, met="true")
    in_time = texts(**{"x-slo-ms": "60000"})
    assert in_time == texts()
    assert "Paris" in in_time[0]
    assert platform.metric("loomserve_slo_met_total", model=HOT, met="true") == before + 2


@pytest.mark.slow
def test_waiting_and_turnaround_are_seen_while_more_is_asked_than_runs(
    platform: Platform,
) -> None:
    oldest, finished = "loomserve_oldest_waiting_seconds", "loomserve_weighted_turnaround"
    before = platform.metric(f"{finished}_count", model=COLD)

    def ask(number: int) -> object:
        return platform.client().completions.create(
            model=COLD, prompt=f"{number}: once", max_tokens=60, extra_body={"ignore_eos": True}
        )

    # At most 16 run at a time.
    with ThreadPoolExecutor(48) as pool:
        answers = pool.map(ask, range(48))
        wait_for(lambda: platform.metric(oldest, model=COLD) > 0.5, 30)
        assert len(list(answers)) == 48
    assert platform.metric(oldest, model=COLD) == 0
    assert platform.metric(f"{finished}_count", model=COLD) == before + 48
    time.sleep(3)  # a report must have come
    load = model_state(platform, COLD)["replicas"][0]["load"]
    assert load["weighted_turnaround"] > 1.1
    assert load["oldest_waiting_s"] == 0


def test_langchain_works_unmodified(platform: Platform) -> None:
    chat = ChatOpenAI(
        model=COLD,
        base_url=f"{platform.url}/v1",
        api_key=platform.key,
        temperature=0,
        max_tokens=16,
    )
    assert "Paris" in chat.invoke("What is the capital of France?").content
    assert "Paris" in "".join(
        part.content for part in chat.stream("What is the capital of France?")
    )


def test_request_ids_come_back(platform: Platform) -> None:
    with platform.http() as http:
        given = http.get("/v1/models", headers={"X-Request-Id": "abc-123"})
        made = http.get("/v1/models")
    assert given.headers["x-request-id"] == "abc-123"
    assert len(made.headers["x-request-id"]) == 32


def test_requests_spread_over_the_replicas(platform: Platform) -> None:
    async def ask() -> None:
        async with openai.AsyncOpenAI(
            base_url=f"{platform.url}/v1",
            api_key=platform.key,
            max_retries=0,
            timeout=CLIENTS_TIMEOUT,
        ) as client:
            await asyncio.gather(
                *(
                    client.completions.create(
                        model=HOT, prompt=f"{i}: once", max_tokens=32, extra_body={"min_tokens": 32}
                    )
                    for i in range(16)
                )
            )

    replicas = [r["id"] for r in platform.state()["models"][0]["replicas"]]
    name = "vllm:request_success_total"
    before = [platform.metric(name, replica=replica) for replica in replicas]
    asyncio.run(ask())
    after = [platform.metric(name, replica=replica) for replica in replicas]
    served = [b - a for a, b in zip(before, after, strict=True)]
    assert sum(served) == 16
    assert min(served) >= 6, f"the load-aware router sent {served}"
    assert platform.metric("loomserve_route_decisions_total", model=HOT) >= 16
