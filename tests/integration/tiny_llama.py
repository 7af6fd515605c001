"""A Llama of two layers with random weights, for tests that need a model and no sense."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def save(folder: Path, *, vocabulary: int, context: int, head_size: int = 8) -> None:
    """Without a tokenizer; the same weights each time, and no token that ends an answer."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=4 * head_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
        eos_token_id=None,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
