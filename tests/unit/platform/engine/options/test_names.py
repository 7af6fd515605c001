"""The options that are read from vLLM's sources are those that vLLM has."""

from __future__ import annotations

import dataclasses

import pytest

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.engine.options.known import check, names_of_engine, of_engine


def test_the_names_are_those_of_vllms_own_classes() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    of_engines = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    of_servers = {field.name for field in dataclasses.fields(FrontendArgs)}
    assert names_of_engine() == of_engines
    check("m", of_engines | of_servers)
    assert of_engine({"max_model_len": 8, "chat_template": "t"}) == {"max_model_len": 8}


def test_an_option_that_vllm_does_not_have_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'m'.*'max_model_length'.*mean 'max_model_len'"):
        check("m", ["max_model_length"])
