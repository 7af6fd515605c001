"""``make gpu-bundle``: what a machine with a GPU and no network needs, in parts under ``.gpu/``.

Each part is an archive of its own, small enough to be sent by itself:

* ``k``: the sources of ``benchmarks.gpu`` and of lending's kernels, and the kernels compiled;
* ``m``: configurations of models, of which weights are made up;
* ``a`` and ``b``: vLLM for CUDA, without what a Llama on FlashAttention 3 does not need;
* ``c``: wheels that vLLM imports, for Python 3.12, where torch and Triton are there already.

Versions are those of ``constraints.txt``, and files those whose hashes ``hashes.txt`` has.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
MOST_BYTES = 60 * 2**20

SOURCES = (
    "benchmarks/__init__.py",
    "benchmarks/gpu",
    "platform/base",
    "platform/lending/__init__.py",
    "platform/lending/cuda",
    "platform/lending/device",
    "platform/lending/leaf.py",
    "platform/lending/policy",
    "platform/lending/ring",
)
FLASH_ATTENTION = ("vllm/vllm_flash_attn/_vllm_fa3_C*.so",)
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*")
"""Of vLLM's files that are no libraries: a front end in Rust, and kernels of other models."""
LIBRARIES = ("vllm/_C_stable_libtorch*.so", "vllm/cumem_allocator*.so", "vllm/spinloop*.so")
WHEELS = (
    *("annotated-types", "apache-tvm-ffi", "cachetools", "cbor2", "fastapi"),
    *("gguf", "httpx2", "jsonschema", "jsonschema-specifications"),
    *("llguidance", "mistral-common", "msgspec", "openai", "openai-harmony"),
    *(
        "opentelemetry-api",
        "partial-json-parser",
        "pybase64",
        "pycountry",
        "pydantic",
        "pydantic-core",
    ),
    *("pydantic-extra-types", "pyzmq", "referencing", "rpds-py", "sniffio", "starlette"),
    *("typing-inspection", "xgrammar"),
)
PLATFORMS = ("any", *(f"manylinux_2_{minor}_x86_64" for minor in (17, 24, 26, 27, 28, 31, 34, 35)))

MODELS = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "vocab_size": 128256,
        "torch_dtype": "bfloat16",
    },
    "qwen-3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
}
"""Shapes as their makers published them; only shapes, as weights are made up."""

Files = Iterable[tuple[str, bytes]]
"""Names and contents of an archive."""


class PartTooLargeError(Exception):
    """A part of the bundle is larger than may be sent."""


def main() -> None:
    chosen = sys.argv[1:] or list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            files = PARTS[part](Path(folder))
            print(f".gpu/{part}: {pack(part, files, BUNDLE) / 2**20:.1f} MiB", flush=True)


def pack(part: str, files: Files, bundle: Path) -> int:
    """Write a part's archive.

    Returns:
        Its bytes.

    Raises:
        PartTooLargeError: there are more of them than may be sent; the archive is removed.
    """
    path = bundle / part / f"{part}.tar.xz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:xz", preset=6) as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    size = path.stat().st_size
    if size > MOST_BYTES:
        path.unlink()
        raise PartTooLargeError(
            f".gpu/{part} has {size / 2**20:.1f} MiB, of at most {MOST_BYTES / 2**20:.0f}"
        )
    return size


def kernels(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Sources, and the cubin and PTX of each kernel for sm_90, by a process that compiles."""
    for source in SOURCES:
        path = ROOT / source
        for file in [path] if path.is_file() else sorted(path.glob("*.py")):
            name = file.relative_to(ROOT)
            # As they are imported, so that the folder they are unpacked to is all that it takes.
            yield (
                str("loomserve" / name if source.startswith("platform") else name),
                file.read_bytes(),
            )
    compiled = folder / "kernels"
    command = [
        sys.executable,
        "-m",
        "benchmarks.gpu.compile",
        str(folder / "k.json"),
        str(compiled),
    ]
    subprocess.run(command, check=True, cwd=ROOT)
    for file in sorted(compiled.iterdir()):
        yield f"kernels/{file.name}", file.read_bytes()


def models(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name, config in MODELS.items():
        yield f"models/{name}/config.json", json.dumps(config, indent=2).encode()


def vllm_sources(folder: Path) -> Iterator[tuple[str, bytes]]:
    """All of vLLM but its libraries, and FlashAttention 3."""
    for name, read in _vllm(folder):
        library = ".so" in Path(name).name
        if _matches(name, FLASH_ATTENTION) or not (library or _matches(name, LEFT_OUT)):
            yield name, read()


def vllm_libraries(folder: Path) -> Iterator[tuple[str, bytes]]:
    for name, read in _vllm(folder):
        if _matches(name, LIBRARIES):
            yield name, read()


def wheels(folder: Path) -> Iterator[tuple[str, bytes]]:
    fetched = fetch(WHEELS, folder / "wheels")
    for file in fetched:
        yield f"wheels/{file.name}", file.read_bytes()


def pinned(names: Iterable[str]) -> str:
    """Return the entries of ``hashes.txt`` of these packages, as a requirements file.

    Raises:
        ValueError: one has none.
    """
    text = (ROOT / "hashes.txt").read_text()
    entries = []
    for name in names:
        found = re.search(rf"^{re.escape(name)}==.*(?:\n .*)*", text, re.MULTILINE)
        if found is None:
            raise ValueError(f"hashes.txt has no {name}")
        entries.append(found[0])
    return "\n".join(entries) + "\n"


def fetch(names: Iterable[str], folder: Path) -> list[Path]:
    """Have pip download the wheels of these packages alone, for Python 3.12."""
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(pinned(names))
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"),
        *("--only-binary", ":all:", "--python-version", "3.12", *platforms),
        *("--dest", str(folder), "--requirement", str(requirements)),
    ]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def _vllm(folder: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    there = folder / "vllm"
    (wheel,) = sorted(there.glob("*.whl")) or fetch(("vllm",), there)
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/"):
                yield name, partial(archive.read, name)


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


PARTS: dict[str, Callable[[Path], Files]] = {
    "k": kernels,
    "m": models,
    "a": vllm_sources,
    "b": vllm_libraries,
    "c": wheels,
}

if __name__ == "__main__":
    os.chdir(ROOT)
    main()
