"""Which of vLLM's options a model brings over HTTP: each was looked at, and is in one list."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from vllm.config import PoolerConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.cli_args import FrontendArgs

from loomserve.platform.base.errors import BadRequest
from loomserve.platform.config import Model
from loomserve.platform.fleet.http_options import TAKEN, TAKEN_WITHIN, check_given_over_http

FILE_ONLY = frozenset(
    {
        # Code, by the name of a class, a module, a plug-in or a loader, or the model's own.
        "compilation_config", "distributed_executor_backend", "ec_manager_config",
        "io_processor_plugin", "logits_processors", "middleware", "model_class_overrides",
        "model_impl", "reasoning_parser_plugin", "scheduler_cls", "structured_outputs_config",
        "tool_parser_plugin", "tool_server", "trust_remote_code", "worker_cls",
        "worker_extension_cls", "hf_overrides", "media_io_kwargs", "mm_processor_kwargs",
        "spec_method", "spec_model", "spec_tokens", "speculative_config", "diffusion_config",
        "kv_offloading_backend", "kv_offloading_size", "offload_backend", "offload_params",
        "cpu_offload_params", "weight_transfer_config", "video_pruning_method",
        "log_config_file",  # Python's logging makes objects of any class that it names
        # Classes of vLLM's that may have a field of any of these kinds in the next version.
        "attention_config", "eplb_config", "fault_tolerance_config", "ir_op_priority",
        "kernel_config", "mamba_config", "quantization_config", "reasoning_config",
        "additional_config",
        # Files, folders, repositories and how they are read, pickles among them.
        "allowed_local_media_path", "chat_template", "code_revision", "config_format",
        "default_mm_loras", "download_dir", "generation_config", "hf_config_path", "hf_token",
        "ignore_patterns", "load_format", "lora_modules", "mm_encoder_fp8_scale_path",
        "mm_encoder_fp8_scale_save_path", "model", "model_loader_extra_config", "model_weights",
        "profiler_config", "pt_load_map_location", "revision", "safetensors_load_strategy",
        "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads", "ssl_ca_certs",
        "ssl_certfile", "ssl_keyfile", "tokenizer", "tokenizer_revision", "uds",
        # Addresses, ports, processes and devices.
        "_api_process_count", "_api_process_rank", "all2all_backend", "allowed_media_domains",
        "cp_kv_cache_interleave_size", "cpu_distributed_timeout_seconds", "data_parallel_address",
        "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb",
        "data_parallel_multi_port_external_lb", "data_parallel_rank", "data_parallel_rpc_port",
        "data_parallel_size", "data_parallel_size_local", "data_parallel_start_rank",
        "data_parallel_supervisor_port", "dbo_decode_token_threshold",
        "dbo_prefill_token_threshold", "dcp_comm_backend", "dcp_kv_cache_interleave_size",
        "dcp_q_replicate", "decode_context_parallel_size", "device_ids",
        "disable_custom_all_reduce", "disable_nccl_for_dp_synchronization",
        "distributed_timeout_seconds", "dp_supervisor_probe_failure_threshold",
        "dp_supervisor_probe_interval_s", "dp_supervisor_probe_timeout_s", "ec_transfer_config",
        "enable_batch_sharded_sampling", "enable_dbo", "enable_elastic_ep",
        "enable_ep_weight_filter", "enable_eplb", "enable_expert_parallel",
        "enable_fault_tolerance", "expert_placement_strategy", "host", "kv_events_config",
        "kv_transfer_config", "master_addr", "master_port", "max_parallel_loading_workers",
        "mm_encoder_tp_mode", "mm_ipc_gpu_memory_gb", "mm_processor_cache_type",
        "mm_processor_device", "mm_tensor_ipc", "nnodes", "node_rank", "numa_bind",
        "numa_bind_cpus", "numa_bind_nodes", "otlp_traces_endpoint", "pipeline_parallel_size",
        "port", "prefill_context_parallel_size", "ray_workers_use_nsight",
        "renderer_num_workers", "tensor_parallel_size", "ubatch_size",
        # Templates, tensors and token ids of clients.
        "enable_mm_embeds", "enable_prompt_embeds", "skip_tokenizer_init", "tokens_only",
        "trust_request_chat_template",
        # Logs, which may hold prompts, and what is shown of the inside.
        "aggregate_engine_logging", "collect_detailed_traces", "cudagraph_metrics",
        "disable_log_stats", "enable_layerwise_nvtx_tracing", "enable_log_deltas",
        "enable_log_outputs", "enable_log_requests", "enable_logging_iteration_details",
        "enable_mfu_metrics", "enable_mm_processor_stats", "enable_return_routed_experts",
        "enable_server_load_tracking", "enable_tokenizer_info_endpoint", "enable_trace_replay",
        "jit_monitor_mode", "jit_monitor_verbose", "kv_cache_metrics", "kv_cache_metrics_sample",
        "log_error_stack", "max_log_len", "per_request_spec_decode_metrics",
        "return_sampling_mask", "show_hidden_metrics_for_version", "use_tqdm_on_load",
        # What the platform itself decides.
        "api_key", "enable_cumem_allocator", "enable_lora", "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras", "enable_tower_connector_lora", "fail_on_environ_validation",
        "fully_sharded_loras", "gpu_memory_utilization", "kv_cache_memory_bytes", "lora_dtype",
        "lora_target_modules", "max_cpu_loras", "max_lora_rank", "max_loras",
        "scheduling_policy", "served_model_name", "shutdown_timeout", "specialize_active_lora",
        # Of vLLM's own server, which does not run, and of what no model here has.
        "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins",
        "cohere_format", "cohere_is_reasoning_model", "disable_access_log_for_endpoints",
        "disable_fastapi_docs", "disable_uvicorn_access_log",
        "enable_flash_late_interaction", "enable_mamba_cache_stochastic_rounding",
        "enable_offline_docs", "enable_request_id_headers", "enable_ssl_refresh",
        "fingerprint_mode", "fingerprint_value", "gdn_prefill_backend",
        "h11_max_header_count", "h11_max_incomplete_event_size", "kda_prefill_backend",
        "kv_cache_dtype_skip_layers", "mamba_cache_philox_rounds", "mamba_ssu_algorithm",
        "mm_device_do_normalize", "mm_encoder_only", "mm_hasher_algorithm", "prefix_match_unit",
        "replayssm_buffer_len", "response_role", "root_path", "ssl_cert_reqs", "ssl_ciphers",
        "use_replayssm", "uvicorn_log_level",
        # Not tried here.
        "anthropic_disabled_thinking_effort", "aux_output_config", "custom_histogram_buckets",
        "dp_sync_interval", "elastic_ep_max_dp_size", "enable_hc_sp",
        "enable_mamba_shared_prefix_checkpoint", "enable_nccl_comm_suspend", "enable_scale_out",
        "enable_shm_tensor_arena", "engram_config", "grpc_port", "kda_decode_backend", "log_level",
        "logging_config", "long_prefill_token_threshold_adaptive", "max_lora_cls_labels",
        "max_num_active_seqs", "sleep_mode_offload_cudagraph", "sleep_preserve_parameter_names",
        "sparse_indexer_topk_backend", "swa_bounded_replay", "tool_strict_level",
        "trust_request_mm_kwargs", "watermark_config",
    }
)  # fmt: skip


def known() -> set[str]:
    return {
        field.name for args in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(args)
    }


def test_each_option_of_this_vllm_is_in_exactly_one_list() -> None:
    assert sorted(known() - TAKEN - FILE_ONLY) == [], "look at these, and put each into a list"
    assert sorted(TAKEN & FILE_ONLY) == []
    assert sorted((TAKEN | FILE_ONLY) - known()) == []


def test_so_is_each_field_of_the_classes_that_are_taken() -> None:
    # A query would be kept with one engine, while its documents go to any.
    of_pooler = {each.name for each in dataclasses.fields(PoolerConfig)}
    assert of_pooler - {"enable_flash_late_interaction"} == TAKEN_WITHIN["pooler_config"]
    classes = {
        field.name
        for field in dataclasses.fields(AsyncEngineArgs)
        if "Config" in str(field.type) and field.name in TAKEN
    }
    assert classes == TAKEN_WITHIN.keys()


def test_what_is_not_taken_is_refused_and_told_where_to_stand() -> None:
    for option in FILE_ONLY:
        with pytest.raises(BadRequest, match="configuration file") as refused:
            check_given_over_http({"max_model_len": 64, option: 1})
        assert refused.value.param == f"engine.{option}"


def test_an_option_that_is_mistyped_is_refused_with_the_nearest() -> None:
    with pytest.raises(BadRequest, match="did you mean 'max_model_len'"):
        check_given_over_http({"max_modell_len": 64})


@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(TAKEN, 1),
        {"dtype": "bfloat16", "quantization": "compressed-tensors", "kv_cache_dtype": "fp8_e4m3"},
        {"tool_call_parser": "qwen3_coder", "reasoning_parser": "deepseek_r1"},
        {"max_model_len": "auto", "seed": None, "enforce_eager": True, "watermark": 0.01},
        {"cudagraph_capture_sizes": [1, 2, 4]},
        {"limit_mm_per_prompt": {"image": 2, "video": {"count": 1, "num_frames": 32}}},
        {"override_generation_config": {"temperature": 0.2, "eos_token_id": [1, 2]}},
        {"default_chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "low"}},
        {"pooler_config": {"pooling_type": "MEAN", "use_activation": True, "step_tag_id": 3}},
    ],
)
def test_sizes_types_parsers_and_switches_are_taken(given: dict[str, Any]) -> None:
    check_given_over_http(given)


@pytest.mark.parametrize(
    "value",
    [
        "/etc/hostname",
        "folder/file",
        "../x",
        "module.Class",
        "module:Class",
        "http://127.0.0.1:1/",
        "{{ messages }}",
        "a b",
        "",
        "a" * 65,
        "dt\n",
        ["/etc/hostname"],
        [[{"a": "b.c"}]],
        {"a": "/etc/hostname"},
        {"a": {"b": ["http://x"]}},
        {"a/b": 1},
    ],
)
def test_nothing_that_is_taken_may_hold_a_path_a_url_or_code(value: object) -> None:
    for option in TAKEN:
        with pytest.raises(BadRequest, match="configuration file") as refused:
            check_given_over_http({option: value})
        assert str(refused.value.param).startswith(f"engine.{option}")


def test_a_field_of_a_class_that_is_not_listed_is_refused() -> None:
    with pytest.raises(BadRequest, match=r"'pooler_config\.path'"):
        check_given_over_http({"pooler_config": {"task": "embed", "path": 1}})


def test_the_file_may_set_them() -> None:
    asked = {"trust_remote_code": True, "worker_cls": "m.C", "chat_template": "/etc/template"}
    assert Model(name="m", source="demo", devices=("core0",), engine=asked).engine == asked
