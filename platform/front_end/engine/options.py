"""A model's engine options, as vLLM's server takes them: parsed as its command line would be."""

from __future__ import annotations

import dataclasses
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.usage.usage_lib import UsageContext

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.engine.options.model_class import look_at_class
from loomserve.platform.engine.options.structured import structured
from loomserve.platform.engine.options.words import in_fields


def server_options(name: str, options: Mapping[str, Any]) -> tuple[Namespace, VllmConfig]:
    """vLLM's arguments of a server, and its configuration.

    Args:
        name: What clients call the model.
        options: Of ``AsyncEngineArgs`` and ``FrontendArgs``, ``model`` among them. Structured ones
            may be given as mappings.

    Raises:
        ConfigError: vLLM refuses them, or lacks a package for the model.
    """
    look_at_class(options)
    of_front_end = {field.name for field in dataclasses.fields(FrontendArgs)}
    front_end = {key: value for key, value in options.items() if key in of_front_end}
    engine = {key: value for key, value in options.items() if key not in of_front_end}
    engine = {"enable_log_requests": False, **engine, "served_model_name": [name]}
    try:
        engine_args = AsyncEngineArgs(**structured(engine))
        config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        # vLLM would keep a query with one engine, while its documents go to any.
        front_end_args = FrontendArgs(**{**front_end, "enable_flash_late_interaction": False})
    except (TypeError, ValueError) as error:
        why = in_fields(str(error))
        raise ConfigError(f"model {name!r}: vLLM refuses its engine options: {why}") from error
    # A few options are both the server's and the engine's.
    return Namespace(**vars(front_end_args) | vars(engine_args)), config
