"""The model catalog: where a model's weights are, checked before anything starts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import SIMULATED
from loomserve.platform.models import demo, remote, simulated
from loomserve.platform.models.policy.folder_kind import (
    JSON_FILES,
    FolderListing,
    FoundFile,
    problem_of,
)
from loomserve.platform.models.remote import is_remote

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "vocab.txt", "*.tiktoken"),
)
_PLAIN_ATTENTION = frozenset({"llama", "qwen2", "qwen3"})
"""``model_type`` of architectures that are known to have it."""
# A model's own files lie at the top; other kinds of folders show two levels below it, and a
# download's leftovers three.
_DEPTH = 3
# A home folder, given by mistake, is not listed whole.
_MOST_FILES = 5000
_HEAD_BYTES = 64
_MOST_JSON_BYTES = 4 << 20


def resolve(
    source: str, base: Path, progress: Callable[[str], None] = print, *, revision: str | None = None
) -> Path | str:
    """The folder of a configured model, or its hub id as it is.

    ``source`` is ``demo``, ``demo:NAME`` or ``simulated`` (made on first use), a folder relative to
    ``base``, a remote folder (fetched on first use), or a hub id with or without ``revision``.
    ``progress`` gets a line for each slow step, and for a hub id without revision. Raises
    ConfigError for a wrong source or a damaged folder, StartError if a demo model cannot be
    fetched.
    """
    if _is_hub_id(source, base):
        if revision is None:
            progress(
                f"warning: {source} has no revision, so whoever can change it on the hub decides "
                "what is loaded here: set revision to a commit's hash"
            )
        return source
    if revision is not None:
        raise ConfigError(
            f"source {source!r} has no revisions, which only hub ids have: leave revision out"
        )
    if source == SIMULATED:
        return simulated.fetch()
    if copy_of(source) is not None:
        fetched = (
            remote.fetch(source, progress)
            if is_remote(source)
            else demo.fetch(source.partition(":")[2] or demo.DEFAULT, progress)
        )
        try:
            check_folder(fetched)
        except ConfigError as error:
            raise ConfigError(f"{error}; delete {fetched} to have it made again") from None
        return fetched
    folder = _folder_of(source, base)
    if folder.exists():
        check_folder(folder)
        return folder
    if "/" in source or source.startswith((".", "~")):
        raise ConfigError(f"source {source!r}: there is no folder {folder}; correct the path")
    raise ConfigError(
        f"source {source!r} is neither a folder nor a hub id (ORG/NAME); "
        f"write demo, demo:NAME, simulated, a folder's path, a remote one (s3://...), or ORG/NAME"
    )


def is_here(source: str) -> bool:
    """Whether :func:`resolve` finds a model without fetching or converting anything."""
    copy = copy_of(source)
    return copy is None or copy.exists() or source == SIMULATED


def copy_of(source: str) -> Path | None:
    """Where this machine keeps its copy of what is fetched on first use; None: it is not."""
    kind, _, name = source.partition(":")
    if is_remote(source):
        return remote.folder_of(source)
    if source == SIMULATED:
        return simulated.folder_of()
    return demo.folder_of(name or demo.DEFAULT) if kind == "demo" else None


def folder_here(source: str, base: Path) -> Path | None:
    folder = copy_of(source) or _folder_of(source, base)
    return folder if folder.exists() else None


def files_here(source: str, base: Path) -> Path | str | None:
    """The same, or the id of a model on the hub, of which this machine may have files."""
    return source if _is_hub_id(source, base) else folder_here(source, base)


def _folder_of(path: str, base: Path) -> Path:
    return (base / Path(path).expanduser()).absolute()


def _is_hub_id(source: str, base: Path) -> bool:
    return _HUB_ID.fullmatch(source) is not None and not (base / source).parent.exists()


def check_folder(folder: Path) -> None:
    """Raises ConfigError, with advice, if a folder is no whole model; reads file headers only."""
    if not folder.is_dir():
        what = "is one GGUF file, which llama.cpp reads" if folder.suffix == ".gguf" else ""
        raise ConfigError(
            f"{folder} {what or 'is not a folder'}; give the folder that has config.json in it"
        )
    _check_kind(folder)
    if not _read_config(folder).get("architectures"):
        raise ConfigError(
            f"{folder / 'config.json'}: names no architectures; "
            "take the file from the model's publisher"
        )
    if not any(path.stat().st_size for name in _TOKENIZER_FILES for path in folder.glob(name)):
        raise ConfigError(
            f"{folder} has no tokenizer (such as tokenizer.json); "
            "copy it from the model's publisher"
        )
    for path in weight_files(folder):
        try:
            # Opening compares the header's extents with the file's length.
            with safe_open(path, framework="numpy"):
                pass
        except FileNotFoundError:
            raise ConfigError(f"{path} is missing; copy the model's weights again") from None
        except (SafetensorError, OSError) as error:
            why = error if path.stat().st_size else "0 bytes"
            raise ConfigError(
                f"{path} is damaged or cut short ({why}); copy the model's weights again"
            ) from None


def _check_kind(folder: Path) -> None:
    try:
        listing = _listing(folder)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be read ({error.strerror})") from None
    if not (
        listing.json.get("config.json", {}).get(simulated.MARK)
        or (problem := problem_of(listing)) is None
    ):
        raise ConfigError(f"{folder} {problem}")


def hidden_size(folder: Path) -> int | None:
    config = _read_config(folder)
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("hidden_size"), int):
            return int(part["hidden_size"])
    return None


def has_plain_attention(folder: Path) -> bool:
    """Whether a model generates, and its layers attend alike to all tokens, by KV of one shape."""
    config = _read_config(folder)
    if config.get(simulated.MARK):
        return False  # nothing attends
    # Embedding models of sentence-transformers may call themselves language models.
    generates = all(name.endswith("ForCausalLM") for name in config.get("architectures", ()))
    if not generates or (folder / "modules.json").exists():
        return False
    windows = config.get("use_sliding_window", True) and config.get("sliding_window")
    return config.get("model_type") in _PLAIN_ATTENTION and not windows


def weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in weight_files(folder))


def known_weight_bytes(resolved: Path | str) -> int:
    """Bytes of the weights that :func:`resolve` has found; 0 of a hub id: only the hub knows."""
    return weight_bytes(resolved) if isinstance(resolved, Path) else 0


def _read_config(folder: Path) -> dict[str, Any]:
    return _read_json(folder / "config.json", "give the folder of a model in transformers' format")


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error}); copy the model's files again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold one JSON object; copy the model's files again")
    return value


def weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = _read_json(index, "copy the model's files again").get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise ConfigError(f"{index}: has no weight_map; copy the model's files again")
        return [folder / name for name in sorted(set(shards.values()))]
    files = sorted(folder.glob("*.safetensors"))
    if not files and not _read_config(folder).get(simulated.MARK):
        raise ConfigError(
            f"{folder} has no *.safetensors; give a model with weights in that format"
        )
    return files


def _listing(folder: Path) -> FolderListing:
    """What is in a folder: names, sizes, first bytes, small JSON; raises OSError."""
    files: dict[str, FoundFile] = {}
    folders: set[str] = set()
    os.scandir(folder).close()  # os.walk would pass over a folder that cannot be read
    for here, inner, names in os.walk(folder):
        place = Path(here).relative_to(folder)
        if len(place.parts) >= _DEPTH:
            inner.clear()
        inner.sort()
        folders |= {(place / name).as_posix() for name in inner}
        for name in sorted(names):
            files[(place / name).as_posix()] = _found(Path(here, name), top=not place.parts)
        if len(files) > _MOST_FILES:
            break
    json_files = {name: _small_json(folder / name) for name in JSON_FILES if name in files}
    return FolderListing(folder.name, files, frozenset(folders), json_files)


def _found(path: Path, *, top: bool) -> FoundFile:
    try:
        size = path.stat().st_size
        head = b""
        if top and path.is_file():
            with path.open("rb") as file:
                head = file.read(_HEAD_BYTES)
    except OSError:  # a link that leads nowhere, or a file that may not be read
        return FoundFile(None)
    return FoundFile(size, head)


def _small_json(path: Path) -> dict[str, object]:
    """Empty for what is not a JSON object; a reader that needs it raises an error."""
    try:
        if path.stat().st_size > _MOST_JSON_BYTES:
            return {}
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
