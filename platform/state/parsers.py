"""How a model's answers are read: which of vLLM's parsers take tool calls and reasoning out."""

from __future__ import annotations

from pydantic import Field

from loomserve.platform.state.base import StateModel


class ParserChoice(StateModel):
    """One of vLLM's parsers, or none."""

    name: str | None = Field(description="As vLLM calls it; null: there is none.")
    why: str = Field(description="For a person: template, architecture or configuration.")

    def __str__(self) -> str:
        return f"{self.name or 'none'} ({self.why})"


class ChatParsers(StateModel):
    """What a model's chats are read by."""

    tool_call: ParserChoice
    reasoning: ParserChoice
