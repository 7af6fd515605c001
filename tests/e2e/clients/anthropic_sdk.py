"""Anthropic's client: ``python anthropic_sdk.py URL KEY MODEL``."""

import sys

import anthropic
import pytest

TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]

url, key, model = sys.argv[1:]
client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)

answer = client.messages.create(model=model, messages=ASKED, max_tokens=8)
assert answer.stop_reason == "max_tokens"
assert answer.usage.output_tokens == 8
assert answer.content[0].text

counted = client.messages.count_tokens(model=model, messages=ASKED)
cached = answer.usage.cache_read_input_tokens or 0
assert counted.input_tokens == answer.usage.input_tokens + cached

with client.messages.stream(model=model, messages=ASKED, max_tokens=8) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == final.content[0].text
assert final.usage.output_tokens == 8

called = client.messages.create(
    model=model, messages=ASKED, tools=[TOOL], tool_choice={"type": "any"}, max_tokens=64
)
(use,) = (each for each in called.content if each.type == "tool_use")
assert (called.stop_reason, use.name) == ("tool_use", "weather")
result = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny"}
after = client.messages.create(
    model=model,
    messages=[
        *ASKED,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ],
    tools=[TOOL],
    max_tokens=8,
)
assert after.usage.output_tokens

begun = [*ASKED, {"role": "assistant", "content": "The weather in"}]
assert client.messages.create(model=model, messages=begun, max_tokens=8).content[0].text

for wrong, error, kind in (
    ({"model": "claude-9"}, anthropic.NotFoundError, "not_found_error"),
    ({"max_tokens": 0}, anthropic.BadRequestError, "invalid_request_error"),
):
    with pytest.raises(error) as raised:
        client.messages.create(**{"model": model, "messages": ASKED, "max_tokens": 8, **wrong})
    assert raised.value.body["type"] == "error", raised.value.body
    assert raised.value.body["error"]["type"] == kind, raised.value.body
with pytest.raises(anthropic.AuthenticationError) as raised:
    client.with_options(api_key="sk-nobody").messages.create(
        model=model, messages=ASKED, max_tokens=8
    )
assert raised.value.body["error"]["type"] == "authentication_error", raised.value.body
print("went through")
