"""Options of vLLM's engine that a model may bring over HTTP: these, and no others.

Whoever has the admin token decides which models run, and whoever writes the configuration file
which code and which files. So what is taken over HTTP are sizes, data types, parsers and switches
that neither import code, open files or connections, read pickles, take templates or tensors from
clients, nor log prompts. A new option of vLLM is refused until somebody has looked at it.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest

TAKEN = frozenset(
    {
        # Sizes, lengths and numbers
        "block_size", "cpu_offload_gb", "cudagraph_capture_sizes", "limit_mm_per_prompt",
        "long_prefill_token_threshold", "mamba_block_size", "max_cudagraph_capture_size",
        "max_logprobs", "max_model_len", "max_num_batched_tokens", "max_num_queued_reqs",
        "max_num_queued_tokens", "max_num_scheduled_tokens", "max_num_seqs",
        "mm_encoder_fp8_scale_save_margin", "mm_processor_cache_gb",
        "mm_shm_cache_max_object_size_mb", "num_gpu_blocks_override", "offload_group_size",
        "offload_num_in_group", "offload_prefetch_step", "override_generation_config",
        "prefill_schedule_interval", "prefix_cache_retention_interval", "seed", "stream_interval",
        "sse_keep_alive_interval", "video_pruning_rate", "watermark",
        # Data types, and forms of weights and kernels, by vLLM's names
        "attention_backend", "dtype", "kv_cache_dtype", "linear_backend", "logprobs_mode",
        "mamba_backend", "mamba_cache_dtype", "mamba_cache_mode", "mamba_ssm_cache_dtype",
        "mm_encoder_attn_backend", "mm_encoder_attn_dtype", "moe_backend", "optimization_level",
        "performance_mode", "prefix_caching_hash_algo", "quantization",
        # What a model does, and how its answers are read
        "chat_template_content_format", "convert", "default_chat_template_kwargs",
        "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "pooler_config",
        "reasoning_parser", "runner", "tokenizer_mode", "tool_call_parser",
        # Switches
        "allow_deprecated_quantization", "async_scheduling", "disable_cascade_attn",
        "disable_chunked_mm_input", "disable_hybrid_kv_cache_manager", "disable_sliding_window",
        "enable_chunked_prefill", "enable_flashinfer_autotune", "enable_force_include_usage",
        "enable_per_request_metrics", "enable_prefix_caching", "enable_prompt_tokens_details",
        "enable_sleep_mode", "enforce_eager", "interleave_mm_strings", "kv_sharing_fast_prefill",
        "language_model_only", "return_tokens_as_token_ids", "scheduler_reserve_full_isl",
        "skip_mm_profiling", "use_fp64_gumbel",
    }
)  # fmt: skip
TAKEN_WITHIN = {
    "pooler_config": frozenset(
        {
            "dimensions", "enable_chunked_processing", "logit_mean", "logit_sigma",
            "max_embed_len", "pooling_type", "returned_token_ids", "seq_pooling_type",
            "step_tag_id", "task", "tok_pooling_type", "use_activation",
        }
    ),
}  # fmt: skip
"""Of options that are classes of vLLM's, the fields that are taken."""

# vLLM's own names have no other characters; paths, URLs, modules' members and templates have.
_WORD = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_given_over_http(options: Mapping[str, Any]) -> None:
    """Raises BadRequest if one of a model's engine options may stand in the configuration file
    only."""
    for option, value in options.items():
        if option not in TAKEN:
            raise _refused(option, "is not one of those that are taken over HTTP", option)
        if isinstance(value, dict) and option in TAKEN_WITHIN:
            for field in value.keys() - TAKEN_WITHIN[option]:
                raise _refused(f"{option}.{field}", "is not taken over HTTP")
        if not _is_plain(value):
            raise _refused(
                option, "is taken over HTTP only as a number, a switch or a name without / and ."
            )


def _refused(option: str, why: str, typed: str = "") -> BadRequest:
    near = difflib.get_close_matches(typed, TAKEN, n=1, cutoff=0.8)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return BadRequest(
        f"engine option {option!r} {why}{hint}: write the model into the configuration file and "
        "start again",
        param=f"engine.{option}",
    )


def _is_plain(value: object) -> bool:
    """Whether it holds numbers, switches and short names only."""
    if isinstance(value, str):
        return _WORD.fullmatch(value) is not None
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, (*value, *value.values())))
    return value is None or isinstance(value, int | float)
