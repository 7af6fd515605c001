"""The matrix of model families: what is asked of each, and what each can do here.

``docs/models.md`` has it as a table, which ``tests/unit/test_models_page.py`` compares with this
one; ``tests/e2e/test_families.py`` has each served, put to sleep and killed.
"""

from __future__ import annotations

import base64
import io
import math
import struct
import wave
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

DEMO_EMBEDDINGS = "demo:all-minilm-l6-v2"
_COMPLETIONS, _CHAT, _EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
_TRANSCRIPTIONS = "/v1/audio/transcriptions"
_TOKENS = 200
_LONG = {"max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
_PROMPT = {"prompt": "Once upon a time there was a small model of many bytes " * 2, **_LONG}
_HELLO = {
    "messages": [{"role": "user", "content": "Say something of the sea, the wind and the land."}],
    **_LONG,
}
_TEXTS = {"input": ["a small dog", "the price of copper"]}
_TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"done": {"type": "boolean"}},
            "required": ["done"],
        },
    },
}


def _image() -> dict[str, Any]:
    written = io.BytesIO()
    Image.new("RGB", (32, 32), (200, 30, 60)).save(written, "PNG")
    data = base64.b64encode(written.getvalue()).decode()
    parts = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    return {"messages": [{"role": "user", "content": parts}], **_LONG}


def _recording() -> bytes:
    """A rising tone of two seconds, at another rate than models of speech hear."""
    rate = 8000
    tones = (math.sin(math.tau * (220 + at / 40) * at / rate) for at in range(2 * rate))
    written = io.BytesIO()
    with wave.open(written, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"".join(struct.pack("<h", int(20_000 * each)) for each in tones))
    return written.getvalue()


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: What it is called there.
        model: Which of ``tests/tiny_models.py``'s, or a source.
        architecture: In vLLM's words.
        endpoint: What is asked.
        body: Of such a request, but for the model's name.
        file: What a form has beside the body's fields; None: the body is JSON.
        engine: Options of its engine.
        stored: Whether the KV store holds its blocks.
        lent: Whether ``lending`` takes it.
        continued: Whether a stream has the same text when its engine is killed.
        resumed: Whether it goes on then; else it ends with an error.
    """

    name: str
    model: str
    architecture: str
    endpoint: str
    body: Mapping[str, Any]
    file: bytes | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    stored: bool = True
    lent: bool = False
    continued: bool = True
    resumed: bool = True

    @property
    def generates(self) -> bool:
        """Whether its answers come as streams, which go on in another engine."""
        return self.endpoint in (_COMPLETIONS, _CHAT, _TRANSCRIPTIONS)


_NGRAM = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 1,
    }
}
_BFLOAT16 = {"dtype": "bfloat16"}
"""In which alone a CPU with AVX512's bfloat16 computes layers with a state."""
_TOOLS = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes"}

FAMILIES = (
    Family(
        "embeddings, real",
        DEMO_EMBEDDINGS,
        "BertModel",
        _EMBEDDINGS,
        _TEXTS,
        stored=False,
    ),
    Family("embeddings", "encoder", "BertModel", _EMBEDDINGS, _TEXTS, stored=False),
    Family(
        "embeddings of a decoder",
        "qwen3",
        "Qwen3ForCausalLM",
        _EMBEDDINGS,
        _TEXTS,
        engine={"runner": "pooling", "convert": "embed"},
    ),
    Family(
        "reranking",
        "cross-encoder",
        "BertForSequenceClassification",
        "/v1/score",
        {"text_1": "a dog", "text_2": ["a small dog", "the price of copper"]},
        stored=False,
    ),
    Family("language", "llama", "LlamaForCausalLM", _COMPLETIONS, _PROMPT, lent=True),
    Family(
        "reasoning",
        "qwen3",
        "Qwen3ForCausalLM",
        _CHAT,
        _HELLO,
        engine={"reasoning_parser": "qwen3"},
        lent=True,
    ),
    Family(
        "tools",
        "qwen3",
        "Qwen3ForCausalLM",
        _CHAT,
        {
            "messages": _HELLO["messages"],
            "max_tokens": _TOKENS,
            "temperature": 0,
            "tools": [_TOOL],
            "tool_choice": "required",
        },
        engine=_TOOLS,
        lent=True,
    ),
    Family(
        "speculation by n-grams",
        "llama",
        "LlamaForCausalLM",
        _COMPLETIONS,
        _PROMPT,
        engine=_NGRAM,
    ),
    Family(
        "int8 weights and activations",
        "quantized",
        "Qwen3ForCausalLM",
        _COMPLETIONS,
        _PROMPT,
        lent=True,
    ),
    Family("experts", "experts", "MixtralForCausalLM", _COMPLETIONS, _PROMPT),
    Family("sliding window", "sliding", "MistralForCausalLM", _COMPLETIONS, _PROMPT, stored=False),
    Family("windows in some layers", "mixed-windows", "Gemma3ForCausalLM", _COMPLETIONS, _PROMPT),
    Family(
        "latent attention",
        "latent",
        "DeepseekV2ForCausalLM",
        _COMPLETIONS,
        _PROMPT,
        stored=False,
        continued=False,
    ),
    Family(
        "state beside attention",
        "hybrid",
        "GraniteMoeHybridForCausalLM",
        _COMPLETIONS,
        _PROMPT,
        engine=_BFLOAT16,
        stored=False,
        resumed=False,
    ),
    Family(
        "state alone",
        "state",
        "Mamba2ForCausalLM",
        _COMPLETIONS,
        _PROMPT,
        engine=_BFLOAT16,
        stored=False,
        resumed=False,
    ),
    Family("images", "vision", "Idefics3ForConditionalGeneration", _CHAT, _image()),
    Family(
        "speech",
        "audio",
        "WhisperForConditionalGeneration",
        _TRANSCRIPTIONS,
        {"language": "en", "temperature": 0, "max_completion_tokens": _TOKENS},
        file=_recording(),
        stored=False,
    ),
)
