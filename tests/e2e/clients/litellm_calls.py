"""LiteLLM: ``python litellm_calls.py URL KEY MODEL``."""

import sys

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
        },
    },
}
ASKED = [{"role": "user", "content": "What is the weather in Paris?"}]

url, key, model = sys.argv[1:]
# Its prices are asked for at an address of the internet else.
litellm.suppress_debug_info = True
for provider, base in (("openai", f"{url}/v1"), ("hosted_vllm", f"{url}/v1"), ("anthropic", url)):
    to = {"model": f"{provider}/{model}", "api_base": base, "api_key": key, "num_retries": 0}
    said = litellm.completion(messages=ASKED, max_tokens=8, **to)
    assert said.choices[0].finish_reason == "length", provider
    assert said.usage.completion_tokens == 8, provider
    chunks = list(litellm.completion(messages=ASKED, max_tokens=8, stream=True, **to))
    assert "".join(each.choices[0].delta.content or "" for each in chunks), provider
    called = litellm.completion(
        messages=ASKED, tools=[TOOL], tool_choice="required", max_tokens=64, **to
    ).choices[0]
    assert called.message.tool_calls[0].function.name == "weather", provider
    assert called.finish_reason == "tool_calls", provider
    try:
        litellm.completion(messages=ASKED, **(to | {"model": f"{provider}/gpt-9"}))
    except litellm.NotFoundError:
        pass
    else:
        raise AssertionError(f"{provider}: an unknown model was answered")
    try:
        litellm.completion(messages=ASKED, **(to | {"api_key": "sk-nobody"}))
    except litellm.AuthenticationError:
        pass
    else:
        raise AssertionError(f"{provider}: a wrong key was taken")
print("went through")
