"""OpenAI's client: ``python openai_sdk.py URL KEY MODEL``."""

import sys

import openai
import pytest

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]

url, key, model = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

assert model in {each.id for each in client.models.list()}

answer = client.chat.completions.create(model=model, messages=ASKED, max_tokens=8, temperature=0)
assert answer.choices[0].finish_reason == "length"
assert answer.usage.completion_tokens == 8
chunks = list(
    client.chat.completions.create(
        model=model,
        messages=ASKED,
        max_tokens=8,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
text = "".join(each.choices[0].delta.content or "" for each in chunks if each.choices)
assert text == answer.choices[0].message.content
assert chunks[-1].usage.completion_tokens == 8

called = client.chat.completions.create(
    model=model, messages=ASKED, tools=[TOOL], tool_choice="required", max_tokens=64, temperature=0
).choices[0]
(call,) = called.message.tool_calls
assert (called.finish_reason, call.function.name) == ("tool_calls", "weather")
result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
after = client.chat.completions.create(
    model=model,
    messages=[*ASKED, called.message, result],
    tools=[TOOL],
    tool_choice="none",
    max_tokens=8,
)
assert after.choices[0].message.content

response = client.responses.create(model=model, input="Say hello.", max_output_tokens=16)
assert response.output_text

no_text = {"role": "tool", "tool_call_id": "c", "content": None}
for wrong, error in (
    ({"model": "gpt-9"}, openai.NotFoundError),
    ({"messages": [no_text]}, openai.BadRequestError),
    ({"temperature": -1}, openai.BadRequestError),
):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": model, "messages": ASKED, **wrong})
    assert raised.value.body["message"]
with pytest.raises(openai.AuthenticationError):
    client.with_options(api_key="sk-nobody").models.list()
print("went through")
