"""One tokenizer for all front ends of a model in a process."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tokenizers.hf import ThreadSafeHFTokenizerMixin, maybe_make_thread_pool


def share_tokenizer(model_config: ModelConfig) -> None:
    """Have all front ends of a model tokenize with the same copies of its tokenizer.

    vLLM reads a tokenizer once, and then each front end copies it, whole, for each thread that may
    use it: tens of megabytes for a name, hundreds with a large vocabulary. The copies keep nothing
    between two calls, and whoever finds none free makes one more. To be called before a front end
    is made.

    Args:
        model_config: vLLM's, of the front end.
    """
    if model_config.skip_tokenizer_init or model_config.enable_prompt_embeds:
        return  # there is none, or each front end adds a word to its own
    tokenizer = cached_tokenizer_from_config(model_config)
    maybe_make_thread_pool(tokenizer, model_config.renderer_num_workers + 1)
    if isinstance(tokenizer, ThreadSafeHFTokenizerMixin):
        type(tokenizer).__copy__ = _itself


def _itself(tokenizer: Any) -> Any:
    return tokenizer
