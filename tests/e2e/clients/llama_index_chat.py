"""LlamaIndex: ``python llama_index_chat.py URL KEY MODEL``."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


url, key, model = sys.argv[1:]
llm = OpenAILike(
    model=model,
    api_base=f"{url}/v1",
    api_key=key,
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=4096,
    max_tokens=64,
    temperature=0,
    max_retries=0,
)
asked = [ChatMessage(role="user", content="What is the weather in Paris?")]
said = llm.chat(asked).message.content
assert said
assert "".join(each.delta or "" for each in llm.stream_chat(asked)) == said
assert llm.complete("Once upon a time").text

tool = FunctionTool.from_defaults(weather)
called = llm.chat_with_tools([tool], chat_history=asked, tool_required=True)
(call,) = llm.get_tool_calls_from_response(called)
assert call.tool_name == "weather"
print("went through")
