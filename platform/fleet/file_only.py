"""Options of vLLM's engine that only the configuration file may set.

Whoever has the admin token decides which models run, and whoever writes the file which code: so a
model that is loaded over HTTP has none of the options by which vLLM imports code, or opens files
and connections that are not the model's.
"""

from __future__ import annotations

from collections.abc import Iterable

from loomserve.platform.base.errors import BadRequest

NAMES_CODE = frozenset(
    {
        "compilation_config",
        "distributed_executor_backend",
        "ec_manager_config",
        "ec_transfer_config",
        "io_processor_plugin",
        "kv_transfer_config",
        # Python's logging makes objects of any class that such a file names.
        "log_config_file",
        "logits_processors",
        "middleware",
        "model_class_overrides",
        "reasoning_parser_plugin",
        "scheduler_cls",
        # A proposer of drafts may be a class.
        "spec_method",
        "spec_model",
        "speculative_config",
        "structured_outputs_config",
        "tool_parser_plugin",
        "tool_server",
        "trust_remote_code",
        "worker_cls",
        "worker_extension_cls",
    }
)
LEADS_OUTSIDE = frozenset(
    {
        "allowed_local_media_path",
        "download_dir",
        "kv_events_config",
        "mm_encoder_fp8_scale_save_path",
        "otlp_traces_endpoint",
        "profiler_config",
    }
)


def check_given_over_http(options: Iterable[str]) -> None:
    """
    Raises:
        BadRequest: one of a model's engine options may stand in the configuration file only.
    """
    for option in options:
        if option in NAMES_CODE | LEADS_OUTSIDE:
            does = "names code to run" if option in NAMES_CODE else "opens files or connections"
            raise BadRequest(
                f"engine option {option!r} {does}, so it is not taken over HTTP: write the model "
                "into the configuration file and start again",
                param=f"engine.{option}",
            )
