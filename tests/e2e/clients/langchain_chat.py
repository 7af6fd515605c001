"""LangChain: ``python langchain_chat.py URL KEY MODEL``."""

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


url, key, model = sys.argv[1:]
chat = ChatOpenAI(
    base_url=f"{url}/v1", api_key=key, model=model, temperature=0, max_tokens=64, max_retries=0
)
question = "What is the weather in Paris?"
said = chat.invoke(question)
assert said.content
assert said.usage_metadata["output_tokens"]
assert "".join(each.content for each in chat.stream(question)) == said.content

called = chat.bind_tools([weather], tool_choice="any").invoke(question)
(call,) = called.tool_calls
assert call["name"] == "weather"
answered = weather.invoke(call)
assert chat.invoke([("user", question), called, answered]).content
assert chat.with_structured_output(City, method="json_schema").invoke("Name a city.").name
assert len(chat.batch([question, question])) == 2
print("went through")
