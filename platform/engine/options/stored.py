"""Which models' engines have a KV store: those of which each block is all of its tokens' state."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from vllm import AsyncEngineArgs
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from loomserve.platform.engine.options.model_class import look_at_class
from loomserve.platform.engine.options.structured import structured

_logger = logging.getLogger(__name__)

_OTHER_STATE = {
    "hybrid": "it has state beside attention's",
    "attention_free": "it has state instead of attention",
    "encoder_decoder": "it attends to what an encoder made of its input",
    "encoder_only": "it attends to all of its input at once",
}
"""By vLLM's words for attention."""


def engine_config(options: Mapping[str, Any]) -> VllmConfig:
    """vLLM's configuration of an engine, without the KV store where that can hold nothing of it.

    Args:
        options: Of ``AsyncEngineArgs``; structured ones may be mappings.

    Raises:
        ConfigError: the model's class needs a package that is not installed.
    """
    look_at_class(options)
    config = AsyncEngineArgs(**structured(options)).create_engine_config()
    if config.kv_transfer_config is None:
        return config
    why = why_not_stored(config.model_config, on_cpu=current_platform.is_cpu())
    if why is None:
        return config
    _logger.warning("the KV store keeps nothing of this model: %s", why)
    return engine_config({**options, "kv_transfer_config": None})


def why_not_stored(model: ModelConfig, *, on_cpu: bool) -> str | None:
    """Why blocks of a model must not be computed with again; None: they may."""
    if model.attn_type in _OTHER_STATE:
        return _OTHER_STATE[model.attn_type]
    if model.use_mla and on_cpu:
        # vLLM switches prefix caching off for it, and would compute without what was loaded.
        return "a CPU computes latent attention of whole prompts only"
    kinds = set(getattr(model.hf_text_config, "layer_types", None) or ())
    if model.get_sliding_window() is not None and len(kinds) < 2:
        # Where some layers have no window, vLLM keeps the blocks of all layers.
        return "all its layers have a sliding window, and vLLM drops blocks behind it"
    return None
