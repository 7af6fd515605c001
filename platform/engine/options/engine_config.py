"""vLLM's configuration of an engine, made of its options.

Only models of which each block is all of its tokens' state have a KV store.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from vllm import AsyncEngineArgs, ModelRegistry
from vllm.config import ModelConfig, VllmConfig
from vllm.platforms import current_platform

from loomserve.platform.base.errors import ConfigError

_logger = logging.getLogger(__name__)

_STATE_KERNEL = "causal_conv1d"
"""vLLM's kernel of layers with a state, in the error of torch that it has none for a format."""
_OTHER_STATE = {
    "hybrid": "it has state beside attention's",
    "attention_free": "it has state instead of attention",
    "encoder_decoder": "it attends to what an encoder made of its input",
    "encoder_only": "it attends to all of its input at once",
}
"""By vLLM's words for attention."""


def engine_config(options: Mapping[str, Any]) -> VllmConfig:
    """vLLM's configuration of an engine, without the KV store where that can hold nothing of it.
    ``options`` are those of ``AsyncEngineArgs``; structured ones may be mappings. Raises
    ConfigError if the model's class needs a package that is not installed."""
    look_at_class(options)
    config = AsyncEngineArgs(**structured(options)).create_engine_config()
    if config.cache_config.mamba_cache_mode != "none" and current_platform.is_cpu():
        # vLLM 0.32 has a CPU's kernel return the state at a prompt's end alone, then looks for
        # the one at a block's end: each prompt of more than a block ends the engine.
        _logger.warning("no prefix caching: a CPU keeps no layer's state of a prompt's beginning")
        return engine_config({**options, "enable_prefix_caching": False})
    if config.kv_transfer_config is None:
        return config
    why = why_not_stored(config.model_config, on_cpu=current_platform.is_cpu())
    if why is None:
        return config
    _logger.warning("the KV store keeps nothing of this model: %s", why)
    return engine_config({**options, "kv_transfer_config": None})


def why_not_stored(model: ModelConfig, *, on_cpu: bool) -> str | None:
    """Why blocks of a model must not be reused; None: they may."""
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


def structured(options: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options with vLLM's classes where mappings stand for them; raises ValueError where
    vLLM refuses what such a mapping says."""
    parsed = dict(options)
    for field in dataclasses.fields(AsyncEngineArgs):
        value = options.get(field.name)
        kind = _config_class(field.type) if isinstance(value, dict) else None
        if kind is not None:
            try:
                parsed[field.name] = TypeAdapter(kind).validate_python(value)
            except ValidationError as error:
                raise ValueError(f"{field.name}: {error}") from error
    return parsed


def _config_class(annotation: Any) -> type | None:
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return annotation
    if get_origin(annotation) is Annotated:
        return _config_class(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        found = (_config_class(each) for each in get_args(annotation))
        return next((each for each in found if each is not None), None)
    return None


def look_at_class(options: Mapping[str, Any]) -> None:
    """Import the class of the model of a folder, and have vLLM know what it can.

    To learn that, vLLM starts a Python that imports vLLM, for ten seconds of a core and more, lest
    CUDA be initialized here; and of what fails there it says only that it failed. Raises
    ConfigError if the class needs a package that is not installed, and names it.
    """
    if not current_platform.is_cpu():
        return
    try:
        config = json.loads((Path(options["model"]) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return  # a hub id, or for vLLM to say
    for name in config.get("architectures") or ():
        if name in ModelRegistry.models:
            _look(name)


def _look(name: str) -> None:
    try:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"vLLM's {name} needs the Python package {missing.name}, which is not installed: "
            "install it, or serve a model of another family"
        ) from None
    except Exception:  # whatever a module raises; vLLM looks once more, and refuses the model
        _logger.warning("the class of %s cannot be imported", name, exc_info=True)


def explained(error: Exception) -> Exception:
    """A better error for one with which an engine was not made, or the same."""
    if isinstance(error, NotImplementedError) and _STATE_KERNEL in str(error):
        return ConfigError(
            "this CPU computes layers with a state, such as Mamba's, in bfloat16 only: set "
            "engine.dtype to bfloat16"
        )
    return error
