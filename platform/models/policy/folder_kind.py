"""What a folder is that is given as a model and is none that can be served, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch

JSON_FILES = ("config.json", "adapter_config.json", "model.safetensors.index.json")
"""Files whose content shows what a folder is."""

_CONFIG, _ADAPTER, _INDEX = JSON_FILES
_GIT_LFS = b"version https://git-lfs"
_WEB_PAGE = (b"<!doctype", b"<html")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_HUB_FOLDER = re.compile(r"models--(.+?)--(.+)")
_PART_DOWNLOADED = ("*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.download")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# No weights, although their names end like them.
_NO_PICKLES = ("training_args.bin", "optimizer*", "scheduler*", "rng_state*", "openvino_*")
# Weights of other programs, and whose.
_OTHERS = {
    "tf_model.h5": "TensorFlow",
    "*.tflite": "TensorFlow Lite",
    "flax_model*.msgpack": "Flax",
    "*.onnx": "ONNX",
    "openvino_*": "OpenVINO",
    "*.mlpackage": "Core ML",
    "*.nemo": "NeMo",
    "rust_model.ot": "rust-bert",
    "weights.npz": "MLX",
    "*.engine": "TensorRT",
}
_NAMED = 3


@dataclass(frozen=True)
class FoundFile:
    size: int | None
    """Bytes; None: it cannot be opened, such as a link that leads nowhere."""
    head: bytes = b""
    """Its first bytes; of files below the top it is empty."""


@dataclass(frozen=True)
class FolderListing:
    name: str
    files: Mapping[str, FoundFile]
    """By their paths in the folder, with ``/``."""
    folders: frozenset[str]
    json: Mapping[str, Mapping[str, object]]
    """The objects that are in those of ``JSON_FILES`` that there are."""

    def top(self, *patterns: str) -> list[str]:
        """Names of files directly in the folder."""
        return [
            name
            for name in self.files
            if "/" not in name and any(fnmatch(name, pattern) for pattern in patterns)
        ]

    @property
    def weights(self) -> list[str]:
        return [name for name in self.top("*.safetensors") if not name.startswith("adapter_model")]


def problem_of(listing: FolderListing) -> str | None:
    """Why the folder is no model to serve, and what to do, as words after its path, if so."""
    return next((why for look in _LOOKS if (why := look(listing)) is not None), None)


def _empty(listing: FolderListing) -> str | None:
    if listing.files or listing.folders:
        return None
    return "is empty; copy the model's files into it"


def _git_lfs(listing: FolderListing) -> str | None:
    pointers = [name for name, file in listing.files.items() if file.head.startswith(_GIT_LFS)]
    if not pointers:
        return None
    return (
        f"was cloned without its large files: {_names(pointers)} only {_say(pointers, 'points')} "
        "to what Git LFS keeps; run `git lfs install && git lfs pull` in it"
    )


def _web_pages(listing: FolderListing) -> str | None:
    pages = [
        name
        for name in listing.top("*.json", "*.safetensors", "*.model", "*.txt")
        if listing.files[name].head.lower().lstrip().startswith(_WEB_PAGE)
    ]
    if not pages:
        return None
    return (
        f"has a web page in the place of {_names(pages)}; download the file itself, from an "
        "address with /resolve/ and not /blob/, and with your token if it asks for one"
    )


def _hub_cache(listing: FolderListing) -> str | None:
    hub = _HUB_FOLDER.fullmatch(listing.name)
    if "snapshots" in listing.folders and (hub or "refs" in listing.folders):
        called = f" of {hub[1]}/{hub[2]}" if hub else ""
        snapshots = [
            name for name in sorted(listing.folders) if re.match(r"snapshots/[^/]+$", name)
        ]
        if not snapshots:
            return f"is the hub's cache{called}, and has no snapshot; download the model again"
        return (
            f"is the hub's cache{called}; give the folder of a snapshot in it, {snapshots[0]}"
            + (f", or write source: {hub[1]}/{hub[2]}" if hub else "")
        )
    cached = [each for name in sorted(listing.folders) if (each := _HUB_FOLDER.fullmatch(name))]
    if not cached or _CONFIG in listing.files:
        return None
    ids = [f"{each[1]}/{each[2]}" for each in cached]
    return f"is the hub's cache of several models; write source: {ids[0]} ({_names(ids)} there)"


def _dangling(listing: FolderListing) -> str | None:
    lost = [name for name in listing.top("*") if listing.files[name].size is None]
    if not lost:
        return None
    return (
        f"has {_names(lost)}, which cannot be opened: a link that leads nowhere, as in a copy of "
        "the hub's cache without its blobs, or a file of another user; copy the files themselves "
        "(cp -rL)"
    )


def _adapter(listing: FolderListing) -> str | None:
    if _ADAPTER not in listing.files or (_CONFIG in listing.files and listing.weights):
        return None
    base = listing.json.get(_ADAPTER, {}).get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    return (
        f"is an adapter{of}, and no model by itself; make its base model the source, and name "
        "this folder under adapters.load"
    )


def _diffusers(listing: FolderListing) -> str | None:
    if "model_index.json" not in listing.files or _CONFIG in listing.files:
        return None
    return (
        "is a pipeline of diffusers (model_index.json), which makes images; language, embedding "
        "and reranking models are served here"
    )


def _mlx(listing: FolderListing) -> str | None:
    config = listing.json.get(_CONFIG, {})
    quantized, known = config.get("quantization"), config.get("quantization_config")
    has_method = isinstance(known, Mapping) and "quant_method" in known
    in_bits = isinstance(quantized, Mapping) and {"group_size", "bits"} <= quantized.keys()
    if has_method or not in_bits:
        return None
    return "has weights that MLX has quantised, for Apple's chips; take the model they were made of"


def _without_config(listing: FolderListing) -> str | None:
    if _CONFIG in listing.files:
        return None
    if (weights := _other_weights(listing)) is not None:
        return weights
    inner = [name for name in sorted(listing.folders) if f"{name}/{_CONFIG}" in listing.files]
    if len(inner) == 1:
        return f"has the model in a folder in it; give {inner[0]}"
    if inner:
        return f"has {len(inner)} models in folders in it; give one, such as {_names(inner)}"
    if "params.json" in listing.files:
        return (
            "has a model in its maker's own format (params.json); take the one in transformers' "
            "format, which has a config.json"
        )
    if (part := _part_downloaded(listing)) is not None:
        return part
    # The reader of config.json has words for a missing one.
    return None


def _other_weights(listing: FolderListing) -> str | None:
    if listing.weights:
        return None
    if gguf := listing.top("*.gguf"):
        return (
            f"has GGUF weights only ({_names(gguf)}), which llama.cpp reads; take the model in "
            "transformers' format, which it was made of"
        )
    for pattern, whose in _OTHERS.items():
        if (found := listing.top(pattern)) or any(fnmatch(n, pattern) for n in listing.folders):
            return (
                f"has {whose}'s weights only ({_names(found or [pattern.strip('*.')])}); take "
                "the model with *.safetensors"
            )
    pickles = [
        name
        for name in listing.top(*_PICKLES)
        if not any(fnmatch(name, pattern) for pattern in _NO_PICKLES)
    ]
    if pickles:
        return (
            f"has its weights in pickles ({_names(pickles)}), which run code when they are read; "
            "take the model with *.safetensors, or, if you trust them, save it so with "
            "transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OTHER)"
        )
    return _part_downloaded(listing)


def _part_downloaded(listing: FolderListing) -> str | None:
    parts = [
        name
        for name in listing.files
        if any(fnmatch(name, pattern) for pattern in _PART_DOWNLOADED)
    ]
    if not parts:
        return None
    return f"is downloaded in part only ({_names(parts)}); go on with the download until it is done"


def _missing_shards(listing: FolderListing) -> str | None:
    named = listing.json.get(_INDEX, {}).get("weight_map")
    if isinstance(named, Mapping):
        wanted = {each for each in named.values() if isinstance(each, str)}
        by = _INDEX
    else:
        wanted, by = _numbered(listing.weights), "their numbers"
    absent = sorted(wanted - set(listing.files))
    if not absent:
        return None
    downloads = _part_downloaded(listing)
    return (
        f"has not all of its weights: {_names(absent)} {_say(absent, 'is')} missing, {len(absent)} "
        f"of {len(wanted)} files by {by}; "
        + ("go on with the download until it is done" if downloads else "copy the weights again")
    )


def _numbered(weights: Collection[str]) -> set[str]:
    """All files that there are if some are ``NAME-00001-of-00003.safetensors``."""
    found = [match for name in weights if (match := _SHARD.fullmatch(name))]
    return {
        f"{each[1]}-{number:05}-of-{each[3]}.safetensors"
        for each in found
        for number in range(1, int(each[3]) + 1)
    }


_LOOKS: tuple[Callable[[FolderListing], str | None], ...] = (
    *(_empty, _git_lfs, _web_pages, _hub_cache, _dangling, _adapter, _diffusers, _mlx),
    *(_without_config, _other_weights, _missing_shards),
)
"""What else a folder may be, the more telling first."""


def _names(names: Collection[str]) -> str:
    some = list(names)[:_NAMED]
    more = len(names) - len(some)
    return ", ".join(some) + (f" and {more} more" if more else "")


_PLURALS = {"points": "point", "is": "are"}


def _say(names: Collection[str], verb: str) -> str:
    return verb if len(names) == 1 else _PLURALS[verb]
