"""Models of one or two layers with random weights, one of each family, in transformers' format.

``python -m tests.tiny_models FOLDER`` writes them all, each into a folder by its name. A family's
weights are the same each time, and no token ends an answer.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CONTEXT = 512
_SPECIAL = (
    *("<|pad|>", "<|end|>", "<|cls|>", "<|sep|>", "<|im_start|>", "<|im_end|>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"),
)
VOCABULARY = 256 + len(_SPECIAL)
"""The bytes, each a token, and the special tokens."""
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def write(family: str, folder: Path) -> Path:
    """Write the model of a family into ``folder``, which is made; returns it."""
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    FAMILIES[family](folder)
    return folder


def _token(name: str) -> int:
    return 256 + _SPECIAL.index(name)


def _tokenizer(folder: Path, *, pairs: bool = False) -> PreTrainedTokenizerFast:
    """Bytes as tokens; ``pairs``: between the marks that encoders are trained with."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    if pairs:
        made.post_processor = processors.TemplateProcessing(
            single="<|cls|> $A <|sep|>",
            pair="<|cls|> $A <|sep|> $B:1 <|sep|>:1",
            special_tokens=[(name, _token(name)) for name in ("<|cls|>", "<|sep|>")],
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=CONTEXT
    )
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def _decoder(kind: str, config: str = "", **changes: Any) -> Callable[[Path], None]:
    """A decoder of transformers' class ``kind``, and of ``config`` if that has another name."""

    def make(folder: Path) -> None:
        made = getattr(transformers, config or f"{kind.partition('For')[0]}Config")
        getattr(transformers, kind)(made(**{**_DECODER, **changes})).save_pretrained(folder)
        _tokenizer(folder)

    return make


def _encoder(name: str, **changes: Any) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        config = transformers.BertConfig(**{**_ENCODER, **changes})
        getattr(transformers, name)(config).save_pretrained(folder)
        _tokenizer(folder, pairs=True)

    return make


def _quantized(folder: Path) -> None:
    """A Qwen3 whose products are of int8: weights by rows, activations by tokens."""
    _decoder("Qwen3ForCausalLM")(folder)
    weights: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = weight.abs().amax(1, keepdim=True) / 127
            weights[name] = (weight / scale).round().to(torch.int8)
            weights[f"{name}_scale"] = scale
        else:
            weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight, "strategy": "token", "dynamic": True},
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


def _vision(folder: Path) -> None:
    """An Idefics3, whose processor needs no torchvision."""
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = transformers.Idefics3Config(
        vision_config=vision,
        text_config={"model_type": "llama", **_DECODER},
        image_token_id=_token("<image>"),
        scale_factor=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    transformers.Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    transformers.Idefics3Processor(
        image_processor=transformers.Idefics3ImageProcessorPil(
            # In four parts, and as a whole.
            size={"longest_edge": 64},
            max_image_size={"longest_edge": 32},
        ),
        tokenizer=_tokenizer(folder),
        image_seq_len=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)


def _whisper(folder: Path) -> None:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=80,
        max_target_positions=CONTEXT,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=_token("<|cls|>"),
        eos_token_id=_token("<|end|>"),
        decoder_start_token_id=_token("<|cls|>"),
    )
    transformers.WhisperForConditionalGeneration(config).save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=80).save_pretrained(folder)
    _tokenizer(folder)


FAMILIES: dict[str, Callable[[Path], None]] = {
    "llama": _decoder("LlamaForCausalLM"),
    "qwen3": _decoder("Qwen3ForCausalLM"),
    "sliding": _decoder("MistralForCausalLM", sliding_window=64),
    "mixed-windows": _decoder(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=32,
    ),
    "experts": _decoder("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=2),
    "latent": _decoder(
        "DeepseekV2ForCausalLM",
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        head_dim=64,
        num_key_value_heads=2,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        moe_intermediate_size=64,
    ),
    "state": _decoder(
        "Mamba2ForCausalLM",
        num_heads=4,
        head_dim=32,
        state_size=16,
        n_groups=1,
        num_attention_heads=4,
    ),
    "hybrid": _decoder(
        "GraniteMoeHybridForCausalLM",
        layer_types=["mamba", "attention"],
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=16,
        mamba_n_groups=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=128,
    ),
    "quantized": _quantized,
    "encoder": _encoder("BertModel"),
    "cross-encoder": _encoder("BertForSequenceClassification", num_labels=1),
    "classifier": _decoder("Qwen3ForSequenceClassification", num_labels=3),
    "vision": _vision,
    "audio": _whisper,
}


if __name__ == "__main__":
    for each in FAMILIES:
        write(each, Path(sys.argv[1]) / each)
