"""An engine's tokenizer, which only grammars need: read with the first request that has one.

vLLM reads it when the engine starts. That takes some tenths of a second, and tens of megabytes as
long as the engine lives, hundreds with a large vocabulary.
"""

from __future__ import annotations

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1 import structured_output
from vllm.v1.structured_output import StructuredOutputManager

_READ = "_tokenizer_read"


def _as_it_is(tokenizer: Any) -> Any:
    """What vLLM 0.32 takes; 0.29 wraps one of Mistral's."""
    return tokenizer


_wrapped = getattr(structured_output, "maybe_wrap_mistral_common_tokenizer", _as_it_is)


def read_with_first_grammar() -> None:
    """Have managers of structured outputs that are made from now on read it when they need it."""
    structured_output.cached_tokenizer_from_config = _none
    StructuredOutputManager.tokenizer = property(_tokenizer, _set)


def _none(model_config: Any) -> None:
    """What their constructors get."""


def _set(manager: StructuredOutputManager, tokenizer: Any) -> None:
    """What they do with it."""


def _tokenizer(manager: StructuredOutputManager) -> Any:
    found = vars(manager).get(_READ)
    if found is None:
        read = cached_tokenizer_from_config(model_config=manager.vllm_config.model_config)
        found = vars(manager)[_READ] = _wrapped(read)
    return found
