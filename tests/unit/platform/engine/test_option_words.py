"""vLLM's command line in words of the configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from loomserve.deployments.controller.models import _reason
from loomserve.platform.engine.options.known import in_fields
from loomserve.platform.http.engine_errors import normalise

FIELD = "models[].engine."


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            '"auto" requires --enable-auto-tool-choice and --tool-call-parser to be set',
            f'"auto" requires {FIELD}enable_auto_tool_choice and {FIELD}tool_call_parser to be set',
        ),
        ("set `--enable-prompt-embeds`.", f"set `{FIELD}enable_prompt_embeds`."),
        ("via --pooler-config.task embed.", f"via {FIELD}pooler_config.task embed."),
        ("try --max-model-len=2048", f"try {FIELD}max_model_len: 2048"),
        ("(--limit-mm-per-prompt)", f"({FIELD}limit_mm_per_prompt)"),
        ("use --enable_lora,", f"use {FIELD}enable_lora,"),
        ("--no-enable-prefix-caching", f"{FIELD}enable_prefix_caching: false"),
        ("VLLM_ALLOW_LONG_MAX_MODEL_LEN=1", "VLLM_ALLOW_LONG_MAX_MODEL_LEN=1"),
        ("a--max-model-len b -- c --- --none-such", "a--max-model-len b -- c --- --none-such"),
        ("loomserve serve --url", "loomserve serve --url"),
        ("", ""),
    ],
)
def test_options_are_named_as_the_configuration_names_them(said: str, told: str) -> None:
    assert in_fields(said) == told


def test_clients_hear_of_fields() -> None:
    error = normalise(b'{"error": {"message": "needs --enable-lora"}}', 400)["error"]
    assert error["message"] == f"needs {FIELD}enable_lora"


def test_operators_hear_of_fields_where_a_model_has_failed() -> None:
    app = SimpleNamespace(message="ValueError: set --max-model-len lower", deployments={})
    assert _reason(app) == f"set {FIELD}max_model_len lower"
