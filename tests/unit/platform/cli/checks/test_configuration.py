"""``config check``: what it looks up, in words that name the field or the file."""

import json
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from loomserve.platform import config as configuration
from loomserve.platform.base.errors import ConfigError
from loomserve.platform.cli.checks.configuration import check_configuration, check_here
from loomserve.platform.config import Config
from loomserve.platform.engine.options import model_check

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "max_position_embeddings": 2048,
}
OWN = {"architectures": ["OwnModel"], "auto_map": {"AutoModel": "own.Model"}}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4}}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))


def configured(tmp_path: Path, files: dict[str, Any], **model: Any) -> Config:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    save_file({"model.layers.0.weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    for name, content in {"config.json": LLAMA, "tokenizer.json": {}, **files}.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(text)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = {"port": sock.getsockname()[1]}
    text = json.dumps({"models": {"a": {"source": "./model", **model}}, "server": server})
    return configuration.parse(text)


def engine(**options: Any) -> dict[str, Any]:
    return {"engine": options}


@pytest.mark.parametrize(
    ("files", "model", "message"),
    [
        ({}, engine(tool_call_parser="hermez"), "tool_call_parser: .*the nearest is hermes"),
        ({}, engine(reasoning_parser="deepseek_r2"), "reasoning_parser: .*deepseek_r1"),
        ({}, engine(quantization="awqq"), "engine.quantization: .*awq"),
        ({}, engine(chat_template="./none.jinja"), "chat_template: there is no file ./none.jinja"),
        ({}, engine(chat_template="{% if x %}"), "chat_template: line 1"),
        ({}, engine(max_model_len="8k"), "is 8000 tokens, and the model has 2048 positions"),
        ({}, engine(max_model_len=4096), "write 2048 or less"),
        ({}, engine(override_generation_config={"top_p": 2}), "top_p is a number, 2"),
        ({"config.json": {"architectures": ["LlamaForCausalML"]}}, {},
         "config.json: architecture LlamaForCausalML is unknown to vLLM .*LlamaForCausalLM"),
        ({"config.json": {"architectures": ["QWenLMHeadModel"]}}, {}, "until version 0.23.0"),
        ({"config.json": OWN}, {}, "trust_remote_code"),
        ({"config.json": {**LLAMA, **AWQ}}, engine(dtype="float32"), "awq are computed"),
        ({"generation_config.json": {"temperature": "warm"}}, {},
         "generation_config.json: temperature is a text, 'warm'"),
        ({"generation_config.json": {"eos_token_id": "</s>"}}, {}, "eos_token_id is a text"),
        ({"generation_config.json": {"eos_token_id": [1, "a"]}}, {}, "eos_token_id is a list"),
        ({"generation_config.json": {"top_k": 0.5}}, {}, "top_k is a number, 0.5"),
        ({"generation_config.json": {"temperature": True}}, {}, "temperature is a truth value"),
        ({"generation_config.json": {"max_new_tokens": "all"}}, {}, "max_new_tokens is a text"),
        ({"generation_config.json": "{"}, {}, "generation_config.json: is not JSON"),
        ({"tokenizer_config.json": {"chat_template": "{% for x in y %}"}}, {},
         "tokenizer_config.json: chat template: line 1"),
        ({"chat_template.jinja": "{{ messages"}, {}, "chat_template.jinja: chat template: line 1"),
        ({}, {"kv_cache_memory": "100TiB"}, "needs about 10240"),
    ],
)  # fmt: skip
def test_what_vllm_would_refuse_is_said_before(
    tmp_path: Path, files: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"(?s)model.*{message}"):
        check_configuration(configured(tmp_path, files, **model), tmp_path, print)


@pytest.mark.parametrize(
    ("files", "options"),
    [
        ({}, {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "max_model_len": "2k"}),
        ({}, {"max_model_len": "auto"}),
        ({}, {"chat_template": "{{ messages[0].content }}"}),
        ({}, {"chat_template": "template_chatml.jinja"}),
        ({"config.json": {**LLAMA, **AWQ}}, {"dtype": "bfloat16"}),
        ({"config.json": OWN}, {"trust_remote_code": True}),
        ({"config.json": {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4}}},
         {"max_model_len": 8192}),
        ({"generation_config.json": {"temperature": "warm"}}, {"generation_config": "vllm"}),
        ({"generation_config.json": {"temperature": "warm"}},
         {"override_generation_config": {"temperature": 1}}),
        ({"generation_config.json": {"temperature": 0.6, "top_p": 1, "top_k": 20, "min_p": 0,
                                     "eos_token_id": [1, 2], "transformers_version": "5"}}, {}),
        ({"tokenizer_config.json": {"chat_template": "{% generation %}a{% endgeneration %}"}}, {}),
        ({"chat_template.jinja": "{% for m in x %}{% break %}{% endfor %}"}, {}),
    ],
)  # fmt: skip
def test_what_is_right_passes(
    tmp_path: Path, files: dict[str, Any], options: dict[str, Any]
) -> None:
    check_configuration(configured(tmp_path, files, engine=options), tmp_path, print)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    wrong = configured(
        *(tmp_path, {"generation_config.json": {"top_p": "most"}}),
        engine={"tool_call_parser": "hermez", "max_model_len": 4096},
    )
    with pytest.raises(ConfigError) as raised:
        check_configuration(wrong, tmp_path, print)
    assert len(str(raised.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("given", "read"), [("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("512", 512), (77, 77)]
)
def test_lengths_are_read_as_vllms_command_line_reads_them(given: object, read: int) -> None:
    text = json.dumps({"models": {"a": {"source": "demo", "engine": {"max_model_len": given}}}})
    assert configuration.parse(text).models[0].engine["max_model_len"] == read


@pytest.mark.parametrize("given", ["8kb", "1.5K", "long", "-8k", ""])
def test_other_lengths_are_refused(given: str) -> None:
    text = json.dumps({"models": {"a": {"source": "demo", "engine": {"max_model_len": given}}}})
    with pytest.raises(ConfigError, match=r"engine.max_model_len: .* is no number; write 8192, 8K"):
        configuration.parse(text)


def test_nothing_of_vllm_is_imported() -> None:
    # It takes 20 s of a core.
    assert not any(str(value).startswith("<module 'vllm") for value in vars(model_check).values())


def test_here_looks_at_the_machine_as_well(tmp_path: Path) -> None:
    there = configured(tmp_path, {})
    check_configuration(there, tmp_path, print)
    check_here(there, tmp_path, print)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", there.server.port))
        sock.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on .*set server\.port"):
            check_here(there, tmp_path, print)
