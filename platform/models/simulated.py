"""The folder of a simulated model: what vLLM's serving layer reads of a model, and no weights.

Its tokenizer has a token for each byte, and for each word that a simulated engine answers with.
"""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import StartError
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.models.once import made_once

MARK = "loomserve_simulated"
"""Field of its config.json."""

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEXT = (
    "a after again all also and any are as at back be but by can come day do even for from get "
    "give good have how if in into it just know like look make most new no not now of on one only "
    "or other our out over so some take than that the then there these think this time to two up "
    "use want way we well what when which who will with work"
)
_WORDS = _TEXT.split()

_FIRST_WORD = len(_SPECIAL) + 256
WORDS = range(_FIRST_WORD, _FIRST_WORD + len(_WORDS))
"""The tokens that answers consist of."""

# A small model's (SmolLM2-135M's), by which its KV blocks have their size.
LAYERS, KV_HEADS, HEAD_SIZE = 30, 3, 64
_CONFIG = {
    MARK: True,
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 9,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ (message.content or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def folder_of() -> Path:
    """Its place on this machine; another one for other contents."""
    digest = hashlib.blake2b(repr(_files()).encode(), digest_size=4).hexdigest()
    return cache_folder() / "models" / f"simulated-{digest}"


def fetch() -> Path:
    """The folder, made on first use; raises StartError if it cannot be written."""
    folder = folder_of()
    try:
        return made_once(folder, _made)
    except OSError as error:
        raise StartError(
            f"the folder of simulated models cannot be written to {folder} "
            f"({error.strerror or error}); make room there, or set LOOMSERVE_HOME to another folder"
        ) from error


def _made(partial: Path) -> Path:
    made = partial / "model"
    made.mkdir()
    for name, text in _files().items():
        (made / name).write_text(text, encoding="utf-8")
    return made


@cache
def _files() -> dict[str, str]:
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "pad_token": _SPECIAL[2],
        "unk_token": _SPECIAL[0],
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": _CONFIG["max_position_embeddings"],
    }
    files = {
        "config.json": _CONFIG,
        "tokenizer.json": _tokenizer(),
        "tokenizer_config.json": settings,
    }
    return {name: json.dumps(each, indent=1, ensure_ascii=False) for name, each in files.items()}


def _tokenizer() -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A space is the letter that byte-level tokenizers have for it.
    vocabulary = [*_SPECIAL, *letters, *(f"\u0120{word}" for word in _WORDS)]
    numbered = {token: number for number, token in enumerate(vocabulary)}
    # A word is looked up as a whole, and else made of its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=numbered, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*_SPECIAL])
    made: dict[str, Any] = json.loads(tokenizer.to_str())
    return made
