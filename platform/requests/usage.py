"""What engines have computed for one HTTP request, as they counted it.

An HTTP request may be several of an engine's: prompts times answers. Whoever answers it adds those
up here, whatever its client is told.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class RequestUsage:
    """Tokens and engine seconds, of the answers that have ended so far."""

    prompt_tokens: int = 0
    """Of each prompt once, however many answers it has."""
    cached_tokens: int = 0
    """Of those, the ones that the prefix cache or the KV store had."""
    completion_tokens: int = 0
    device_s: float = 0.0
    timed_tokens: int = 0
    """Computed in ``device_s``."""
    untimed_tokens: int = 0
    """Computed in a time that no engine told, as where an answer was cut off."""
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
        """Tokens of an answer that ended where its model or a stop string ended it.

        None: it was cut off, or there are several. If its client has left, it is what it had then.
        """
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
        """Count a prompt that an engine had, and of which it has told nothing."""
        self._unanswered[prompt_id] = tokens
