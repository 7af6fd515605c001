"""Where an answer's text begins if its prompt ends inside a character.

Tokens hold bytes, so a prompt's last character may be finished by the answer's first tokens. It is
then the answer's, whole. A character that the answer does not finish stays the prompt's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What tokenizers show for bytes that are no character (yet)."""

# A character has four bytes, and a token one at least.
_MOST_MISSING = 3
_FEWEST_TOKENS = 8

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class PromptEnd:
    """The last tokens of a prompt, which begin with a whole character."""

    tokens: Sequence[int]
    text: str
    """Of the tokens; a character that is not whole is shown as ``UNFINISHED``."""
    finished: str = ""
    """Of those of the tokens that end with a whole character, if the last ones do not."""
    echoed: bool = False
    """The client gets the prompt's whole characters before the answer, so that one that the answer
    does not finish is in the answer, too."""

    @property
    def is_whole(self) -> bool:
        return not self.text.endswith(UNFINISHED)

    def answer_in(self, text: str) -> str:
        """The answer's part of the text of these tokens and the answer's."""
        if self.echoed:
            return text[_shared(text, self.text.rstrip(UNFINISHED)) :]
        return text[max(_shared(text, self.text), _shared(text, self.finished)) :]


def prompt_end(prompt: Sequence[int], decode: Decode, *, echoed: bool = False) -> PromptEnd:
    """The shortest end of a prompt that an answer can be decoded after; ``echoed``: it is shown."""
    size = _FEWEST_TOKENS
    tokens = prompt[-size:]
    text = decode(tokens)
    # A text that begins in the midst of a character may be another one than in its place.
    while size < len(prompt) and (not text or text.startswith(UNFINISHED)):
        size *= 2
        tokens = prompt[-size:]
        text = decode(tokens)
    if not text.endswith(UNFINISHED):
        return PromptEnd(tokens, text)
    return PromptEnd(tokens, text, _finished(tokens, decode), echoed)


def _shared(one: str, other: str) -> int:
    """Characters that both begin with."""
    pairs = zip(one, other, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _finished(tokens: Sequence[int], decode: Decode) -> str:
    for missing in range(1, _MOST_MISSING + 1):
        text = decode(tokens[:-missing])
        if not text.endswith(UNFINISHED):
            return text
    return ""
