"""An offline model, from requests as clients send them to OpenAI's objects."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    PreTrainedTokenizerFast,
)

from loomserve.platform.base.errors import BadRequest, ConfigError, StartError
from loomserve.platform.batch.offline.executor import OfflineExecutor, OfflineRequest, check
from loomserve.platform.batch.offline.lines import CHAT, COMPLETIONS, OfflineLines
from loomserve.platform.batch.offline.models import check_offline_models
from loomserve.platform.batch.offline.worker import OfflineAnswer, OfflineLine
from loomserve.platform.config import Config, parse
from tests.integration import tiny_llama

CONTEXT = 64
WORDS = [f"w{n}" for n in range(126)]
TEMPLATE = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}assistant"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama.save(folder, vocabulary=128, context=CONTEXT)
    vocabulary = {word: at for at, word in enumerate([*WORDS, "user", "assistant"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lines(model: Path) -> OfflineLines:
    return OfflineLines(str(model), OfflineExecutor(model, threads=1, kv_bytes=10**9))


def line(path: str, **body: Any) -> OfflineLine:
    return OfflineLine("1", path, {"model": "m", "max_tokens": 5, "temperature": 0, **body})


def answered(lines: OfflineLines, *given: OfflineLine) -> list[OfflineAnswer]:
    requests = [lines.read(one) for one in given]
    found = lines.run(requests, frozenset)
    return [lines.answer(*one) for one in zip(given, requests, found, strict=True)]


def test_answers_are_openais_objects_and_those_of_the_prompt_alone(lines: OfflineLines) -> None:
    said = [{"role": "user", "content": "w1 w2"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "w1 w2"}]}]
    chat, same, text, ids = (
        json.loads(one.body)
        for one in answered(
            lines,
            line(CHAT, messages=said),
            line(CHAT, messages=parts, max_completion_tokens=5),
            line(COMPLETIONS, prompt="user w1 w2 assistant"),
            line(COMPLETIONS, prompt=[126, 1, 2, 127], max_tokens=3),
        )
    )
    assert (chat["object"], text["object"]) == ("chat.completion", "text_completion")
    assert chat["usage"] == {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}
    assert chat["choices"][0]["finish_reason"] == "length"
    content = chat["choices"][0]["message"]["content"]
    assert content == same["choices"][0]["message"]["content"] == text["choices"][0]["text"]
    assert content.split()[:3] == ids["choices"][0]["text"].split()


def test_an_answer_that_ended_by_itself_says_so(lines: OfflineLines, model: Path) -> None:
    [whole] = lines.run([OfflineRequest([1, 2, 3], 5)], frozenset)
    executor = OfflineExecutor(model, threads=1, kv_bytes=10**9)
    executor.end_tokens = frozenset({whole[2]})
    ends = OfflineLines(str(model), executor)
    [answer, other] = answered(
        ends,
        line(COMPLETIONS, prompt=[1, 2, 3]),
        line(COMPLETIONS, prompt=[1, 2, 3], ignore_eos=True),
    )
    assert json.loads(answer.body)["choices"][0]["finish_reason"] == "stop"
    assert answer.tokens == whole.index(whole[2]) + 1
    assert json.loads(other.body)["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        (COMPLETIONS, {"prompt": ["a", "b"]}, None),
        (COMPLETIONS, {"prompt": [128]}, "prompt"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": "w1", "max_tokens": CONTEXT}, "prompt"),
        (COMPLETIONS, {"prompt": "w1", "temperature": "hot"}, "temperature"),
        (COMPLETIONS, {"prompt": "w1", "n": 2}, "n"),
        (COMPLETIONS, {"prompt": "w1", "logprobs": 3}, "logprobs"),
        (COMPLETIONS, {"prompt": "w1", "vllm_xargs": {"loomserve_background": 1}}, "vllm_xargs"),
        ("/v1/embeddings", {"input": "w1"}, None),
    ],
)
def test_what_is_not_answered_is_refused_with_its_field(
    lines: OfflineLines, path: str, body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(BadRequest) as refused:
        lines.read(line(path, **body))
    assert refused.value.message
    if param is not None:
        assert refused.value.param == param


def test_a_seed_draws_the_same_answer_whoever_else_is_in_the_batch(lines: OfflineLines) -> None:
    def asked(seed: int, **more: Any) -> OfflineLine:
        given = {"max_tokens": 20, "temperature": 1.5, "top_p": 0.9, "seed": seed, **more}
        return line(COMPLETIONS, prompt="w1", **given)

    [alone] = answered(lines, asked(7))
    [beside, other, greedy] = answered(lines, asked(7), asked(8), asked(7, temperature=0))
    texts = [json.loads(one.body)["choices"][0]["text"] for one in (alone, beside, other, greedy)]
    assert texts[0] == texts[1]
    assert len(set(texts)) == 3


def test_a_nucleus_of_the_first_token_is_greedy(lines: OfflineLines) -> None:
    drawn, greedy = answered(
        lines,
        line(COMPLETIONS, prompt="w1", temperature=2, top_p=1e-6),
        line(COMPLETIONS, prompt="w1"),
    )
    texts = [json.loads(one.body)["choices"][0]["text"] for one in (drawn, greedy)]
    assert texts[0] == texts[1]


def test_a_batch_does_not_go_on_for_those_that_left_it(lines: OfflineLines) -> None:
    steps = 0

    def left() -> set[int]:
        nonlocal steps
        steps += 1
        return {0} if steps > 3 else set()

    first, second = lines.run([OfflineRequest([1], 30), OfflineRequest([2], 6)], left)
    assert (len(first), len(second), steps) == (3, 6, 7)


def test_only_models_that_padded_batches_run_are_taken(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)).save_pretrained(
        tmp_path / "gpt2"
    )
    check(tmp_path / "gpt2")
    executor = OfflineExecutor(tmp_path / "gpt2", threads=1, kv_bytes=10**9)
    assert executor.token_bytes == 2 * 8 * 4
    MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=16).save_pretrained(
        tmp_path / "mamba"
    )
    with pytest.raises(ConfigError):
        check(tmp_path / "mamba")


def test_the_platform_checks_them_apart_and_plans_their_memory(model: Path, tmp_path: Path) -> None:
    def config(source: str) -> Config:
        return parse(
            "devices: [{name: core0, cores: [0]}]\n"
            "models: []\n"
            f"batch: {{offline_models: [{{name: m, source: {source}, device: core0}}]}}\n"
        )

    assert check_offline_models(config(str(model)), tmp_path, print) > 512 * 2**20
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    written = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(written | {"model_type": "unheard-of"}))
    with pytest.raises((ConfigError, StartError), match=r"batch\.offline_models, 'm'"):
        check_offline_models(config(str(broken)), tmp_path, print)
