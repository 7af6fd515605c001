"""Options that name code: the configuration file may set them, a request may not."""

from __future__ import annotations

import dataclasses
import re

import pytest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.config import Model
from loomserve.platform.fleet.file_only import LEADS_OUTSIDE, NAMES_CODE, check_given_over_http

# What vLLM's names for options that take a class, a module or a file look like.
_TELLING = re.compile(
    r"_cls|class|plugin|processor|middleware|_config$|backend|module|overrides|path|_dir$|file|endpoint$|"
    r"remote_code|code_revision|server$|spec_"
)
# They were looked at, and neither import what they name nor open what they say.
_HARMLESS = frozenset(
    {
        # One of a fixed number of names.
        "all2all_backend", "attention_backend", "data_parallel_backend", "dcp_comm_backend",
        "gdn_prefill_backend", "kda_prefill_backend", "kv_offloading_backend", "linear_backend",
        "mamba_backend", "mm_encoder_attn_backend", "moe_backend", "offload_backend",
        # Numbers, and names of tokens and layers.
        "additional_config", "attention_config", "diffusion_config", "eplb_config",
        "fault_tolerance_config", "hf_overrides", "kernel_config",
        "lora_target_modules", "mamba_config", "model_loader_extra_config",
        "override_generation_config", "pooler_config", "quantization_config", "reasoning_config",
        "weight_transfer_config", "generation_config", "mm_processor_cache_gb",
        "mm_processor_cache_type", "mm_processor_device", "mm_processor_kwargs",
        "enable_mm_processor_stats", "per_request_spec_decode_metrics", "spec_tokens",
        # Of the model's own data.
        "code_revision", "hf_config_path", "mm_encoder_fp8_scale_path", "lora_modules",
        # Of vLLM's own server, which does not run.
        "enable_tokenizer_info_endpoint", "root_path", "ssl_certfile", "ssl_keyfile",
    }
)  # fmt: skip


def known() -> set[str]:
    return {
        field.name for args in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(args)
    }


@pytest.mark.parametrize("option", sorted(NAMES_CODE | LEADS_OUTSIDE))
def test_an_option_that_names_code_or_leads_outside_is_refused(option: str) -> None:
    with pytest.raises(BadRequest, match="configuration file") as refused:
        check_given_over_http(["max_model_len", option])
    assert refused.value.param == f"engine.{option}"


def test_the_rest_is_taken() -> None:
    check_given_over_http(known() - NAMES_CODE - LEADS_OUTSIDE)


def test_the_file_may_set_them() -> None:
    asked = dict.fromkeys(NAMES_CODE - {"scheduler_cls"}, "module.Class")
    assert Model(name="m", source="demo", devices=("core0",), engine=asked).engine == asked


def test_no_option_of_this_vllm_that_sounds_like_code_was_overlooked() -> None:
    telling = {option for option in known() if _TELLING.search(option)}
    assert not telling - NAMES_CODE - LEADS_OUTSIDE - _HARMLESS
    assert not (NAMES_CODE | LEADS_OUTSIDE) - known()
    assert not _HARMLESS - telling
