"""What engines have computed of one request, and in which time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from loomserve.platform.requests.usage import RequestUsage


class Prompt(Protocol):
    """What an engine tells of a prompt, all in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass
class ComputedTokens:
    """Tokens of a prompt and its answer, by whether their engine has told its time."""

    prompt: Prompt | None = None
    """As the engine that gave the first token had it; None: there is none yet."""
    timed: int = 0
    untimed: int = 0
    device_s: float = 0.0
    """Of the timed ones."""

    def begin(self, prompt: Prompt) -> None:
        """The first token is there; later ones are of engines with which the request goes on."""
        if self.prompt is None:
            self.prompt = prompt

    def note(self, answered: int, device_s: float | None) -> None:
        """An engine has ended with the request.

        Args:
            answered: tokens that it has been answered so far, of all engines.
            device_s: the engine's seconds for it; None: it did not tell.
        """
        computed = 0 if self.prompt is None else self.prompt.num_computed_tokens + answered
        new = computed - self.timed - self.untimed
        if device_s is None:
            self.untimed += new
        else:
            self.timed += new
            self.device_s += device_s

    def add_to(self, usage: RequestUsage, prompt_id: str, answered: int, *, cut_off: bool) -> None:
        """The request has ended; its prompt has an id that other answers to it share."""
        if self.prompt is None:
            return
        self.note(answered, None)
        prompt = self.prompt
        usage.add_prompt(prompt_id, prompt.num_prompt_tokens, prompt.num_cached_tokens)
        usage.answers += 1
        usage.cut_off |= cut_off
        usage.completion_tokens += answered
        usage.timed_tokens += self.timed
        usage.untimed_tokens += self.untimed
        usage.device_s += self.device_s
