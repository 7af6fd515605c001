"""An engine's tokenizer, which only grammars need: read with the first request that has one.

vLLM reads it when the engine starts. That takes some tenths of a second, and tens of megabytes as
long as the engine lives, hundreds with a large vocabulary.

Grammars are compiled by half of the engine's own cores. vLLM would have as many compiled at once as
half of the machine's cores, and xgrammar each by eight threads: steps of an engine with one core
took three times as long beside one, and take twice as long with one thread.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1 import structured_output
from vllm.v1.structured_output import StructuredOutputManager

_READ = "_tokenizer_read"
_AT_ONCE = 2
_MOST_THREADS = 8
"""Of one grammar."""


def read_with_first_grammar() -> None:
    """Have managers of structured outputs that are made from now on read it when they need it."""
    structured_output.cached_tokenizer_from_config = _none
    StructuredOutputManager.tokenizer = property(_tokenizer, _set)


def _none(model_config: Any) -> None:
    """What their constructors get."""


def _set(manager: StructuredOutputManager, tokenizer: Any) -> None:
    """What they do with it, just after they have made their threads."""
    manager.executor = ThreadPoolExecutor(_divided()[0], "grammars")


def _divided() -> tuple[int, int]:
    """How many grammars are compiled at once, and by how many threads each."""
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    at_once = min(_AT_ONCE, threads)
    return at_once, min(_MOST_THREADS, threads // at_once)


def _bound_xgrammar() -> None:
    import xgrammar

    class Compiler(xgrammar.GrammarCompiler):
        def __init__(self, info: Any, **options: Any) -> None:
            super().__init__(info, **{**options, "max_threads": _divided()[1]})

    vars(xgrammar)["GrammarCompiler"] = Compiler


def _tokenizer(manager: StructuredOutputManager) -> Any:
    found = vars(manager).get(_READ)
    if found is None:
        _bound_xgrammar()
        read = cached_tokenizer_from_config(model_config=manager.vllm_config.model_config)
        found = vars(manager)[_READ] = read
    return found
