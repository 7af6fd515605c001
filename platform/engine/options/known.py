"""Names that vLLM knows for some options, read from its installed sources, not imported."""

from __future__ import annotations

from functools import cache

from loomserve.platform.engine.hooks import module_path
from loomserve.platform.engine.options.sources import literals_of

_REGISTRY = "vllm.model_executor.models.registry"
# Of classes of transformers': vLLM makes one of these into another.
_ENDINGS = (
    *("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel", "ForTextEncoding"),
    *("EmbeddingModel", "ForSequenceClassification", "ForTokenClassification"),
    *("ClassificationModel", "ForRewardModeling", "RewardModel", "Model"),
)


@cache
def architectures() -> frozenset[str]:
    """Those that vLLM has code of its own for."""
    gone = ("_PREVIOUSLY_SUPPORTED_MODELS", "_OOT_SUPPORTED_MODELS")
    tables = literals_of(_REGISTRY, lambda name: name.endswith("_MODELS") and name not in gone)
    return frozenset(key for table in tables.values() for key in table)


def past_architectures() -> dict[str, str]:
    """Architectures that it had, each with the last version that did."""
    (table,) = literals_of(_REGISTRY, lambda name: name == "_PREVIOUSLY_SUPPORTED_MODELS").values()
    return {name: str(version) for name, version in table.items()}


def is_known_architecture(name: str) -> bool:
    """Whether vLLM can compute it, if need be with transformers' code or a class made of it."""
    return (
        name in architectures()
        or f'"{name}"' in _text("transformers.models.auto.modeling_auto")
        or any(
            name.endswith(ending) and name.removesuffix(ending) + other in architectures()
            for ending in _ENDINGS
            for other in _ENDINGS
        )
    )


def tool_parsers() -> frozenset[str]:
    """What ``tool_call_parser`` may be."""
    return _keys("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER")


def reasoning_parsers() -> frozenset[str]:
    """What ``reasoning_parser`` may be."""
    return _keys("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER")


def quantizations() -> frozenset[str]:
    """What ``quantization`` may be."""
    return _keys("vllm.model_executor.layers.quantization", "QuantizationMethods")


def chat_templates() -> frozenset[str]:
    """Files of chat templates that vLLM brings along."""
    return frozenset(
        each.name
        for each in module_path("vllm.transformers_utils.chat_templates").parent.glob("*.jinja")
    )


@cache
def _keys(module: str, table: str) -> frozenset[str]:
    (found,) = literals_of(module, lambda name: name == table).values()
    return frozenset(found)


@cache
def _text(module: str) -> str:
    return module_path(module).read_text(encoding="utf-8")
