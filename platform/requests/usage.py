"""What engines have computed for one HTTP request, as they counted it.

An HTTP request may be several engine requests (prompts times answers), whose sum this is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass
class RequestUsage:
    prompt_tokens: int = 0
    """Of each prompt once, however many answers it has."""
    cached_tokens: int = 0
    """Of those, the ones that the prefix cache or the KV store had."""
    completion_tokens: int = 0
    device_s: float = 0.0
    timed_tokens: int = 0
    untimed_tokens: int = 0
    """Computed in a time that no engine reported, as where an answer was cut off."""
    answers: int = 0
    """Of which an engine has given a token."""
    outputs: int = 0
    """How many engines have given so far, also of answers that have not ended."""
    cut_off: bool = False
    """Whether an answer had an end that its model did not choose."""
    _prompts: set[str] = field(default_factory=set)
    _unanswered: dict[str, int] = field(default_factory=dict)

    @property
    def spent(self) -> tuple[int, int]:
        """Tokens of prompts, also of those that engines had not answered yet, and of answers."""
        unanswered = self._unanswered.keys() - self._prompts
        prompts = self.prompt_tokens + sum(self._unanswered[each] for each in unanswered)
        return prompts, self.completion_tokens

    @property
    def own_length(self) -> int | None:
        """Tokens of a single answer that its model or a stop string ended; None: it was cut off,
        or there are several. If its client has left, it is what it had then."""
        return self.completion_tokens if self.answers == 1 and not self.cut_off else None

    @property
    def begun(self) -> bool:
        """Whether an engine has given a first token, or an embedding."""
        return bool(self._prompts)

    def add_prompt(self, prompt_id: str, tokens: int, cached: int) -> None:
        """Count a prompt, unless another answer to it has brought it already."""
        if prompt_id not in self._prompts:
            self._prompts.add(prompt_id)
            self.prompt_tokens += tokens
            self.cached_tokens += cached

    def add_unanswered(self, prompt_id: str, tokens: int) -> None:
        self._unanswered[prompt_id] = tokens


class Prompt(Protocol):
    """What an engine reports of a prompt, all in tokens."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass
class ComputedTokens:
    """Tokens of a prompt and its answer, by whether their engine has reported its time."""

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
        """An engine has ended with the request after ``answered`` tokens of all engines and
        ``device_s`` seconds of its own; None: it did not report them."""
        computed = 0 if self.prompt is None else self.prompt.num_computed_tokens + answered
        new = computed - self.timed - self.untimed
        if device_s is None:
            self.untimed += new
        else:
            self.timed += new
            self.device_s += device_s

    def add_to(self, usage: RequestUsage, prompt_id: str, answered: int, *, cut_off: bool) -> None:
        """Add a request that has ended to the HTTP request's; answers to a prompt share its id."""
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
