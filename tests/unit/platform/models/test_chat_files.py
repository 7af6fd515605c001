"""What is read of a model's folder to choose its parsers, and where it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from loomserve.platform.models import simulated
from loomserve.platform.models.chat_files import choose_parsers, fetch_from_hub

QWEN3 = (
    "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"
    "{{ tools }}<tool_call>{% if enable_thinking %}<think>{% endif %}"
)
CLOSED = "{% if enable_thinking %}<think>{% else %}<think>\n\n</think>\n\n{% endif %}"


def model(folder: Path, settings: dict[str, Any] | None = None, **files: object) -> Path:
    tokens = [{"content": "<think>"}, {"content": "</think>"}]
    said = {"config": {"model_type": "qwen3"}, "tokenizer": {"added_tokens": tokens}} | files
    said["tokenizer_config"] = settings or {}
    for name, value in said.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def names(folder: Path, **options: object) -> tuple[str | None, str | None]:
    chosen = choose_parsers(folder, options)
    return chosen.tool_call.name, chosen.reasoning.name


def test_a_template_is_read_from_the_settings_of_the_tokenizer(tmp_path: Path) -> None:
    assert names(model(tmp_path, {"chat_template": QWEN3})) == ("hermes", "qwen3")


def test_or_from_a_file_of_its_own(tmp_path: Path) -> None:
    (model(tmp_path) / "chat_template.jinja").write_text(QWEN3)
    assert names(tmp_path) == ("hermes", "qwen3")


def test_or_from_one_beside_it_that_is_for_tools(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": QWEN3}, {"name": "default", "template": "Hi"}]
    assert names(model(tmp_path, {"chat_template": named})) == ("hermes", "qwen3")


@pytest.mark.parametrize("as_file", [False, True])
def test_or_as_configured(tmp_path: Path, as_file: bool) -> None:
    model(tmp_path, {"chat_template": "{{ messages[0].content }}"})
    path = tmp_path / "own.jinja"
    path.write_text(QWEN3)
    assert names(tmp_path) == (None, None)
    assert names(tmp_path, chat_template=str(path) if as_file else QWEN3) == ("hermes", "qwen3")


def test_a_template_that_has_ended_reasoning_needs_a_parser_that_awaits_none(
    tmp_path: Path,
) -> None:
    settings = {"chat_template": QWEN3 + CLOSED}
    assert names(model(tmp_path, settings)) == ("hermes", "deepseek_v3")


def test_a_template_that_cannot_be_rendered_still_has_its_marks(tmp_path: Path) -> None:
    settings = {"chat_template": QWEN3 + "{{ raise_exception('no') }}"}
    assert names(model(tmp_path, settings)) == ("hermes", "qwen3")


def test_mistrals_own_tokenizer_needs_no_template(tmp_path: Path) -> None:
    special = [{"token_str": each} for each in ("[TOOL_CALLS]", "[THINK]", "[/THINK]")]
    folder = model(tmp_path, tokenizer={}, tekken={"special_tokens": special})
    assert names(folder) == ("mistral", "mistral")


@pytest.mark.parametrize("broken", ["{", '"text"', "[1]"])
def test_files_that_are_broken_stop_nothing(tmp_path: Path, broken: str) -> None:
    (model(tmp_path) / "tokenizer_config.json").write_text(broken)
    assert names(tmp_path) == (None, None)


def test_of_a_hub_id_the_small_files_are_fetched_and_then_read_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot(name: str, **how: Any) -> str:
        asked.append({"name": name, **how})
        if len(asked) == 1:
            raise ConnectionError("the hub is away")
        return str(model(tmp_path, {"chat_template": QWEN3}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    fetch_from_hub("org/m", "1234")  # a hub that is away stops nothing
    assert (asked[0]["name"], asked[0]["revision"]) == ("org/m", "1234")
    assert "*.safetensors" not in asked[0]["allow_patterns"]
    assert choose_parsers("org/m", {}, revision="1234").tool_call.name == "hermes"
    assert asked[1]["local_files_only"] is True


def test_without_files_of_a_hub_id_that_is_the_reason() -> None:
    chosen = choose_parsers("org/none-such", {})
    assert chosen.tool_call.name is None
    assert "cannot be read" in chosen.tool_call.why


def test_simulated_models_take_tools() -> None:
    assert names(simulated.fetch()) == ("hermes", None)
