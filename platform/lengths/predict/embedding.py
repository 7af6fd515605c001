"""A text's embedding: the mean of a language model's own embeddings of its tokens.

Magnus embeds with LaBSE and UELLM reads a language model's hidden states. Both need a forward pass:
on one core, MiniLM (22 M parameters) takes about 10 ms per request and SmolLM2's thirty layers
about 60, while the budget is 3. The embedding table of a model that is served anyway needs no
download, no training and no forward pass; its mean keeps a text's topic and kind, and loses the
order of its words. docs/lengths.md shows what the hidden states would add.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from loomserve.platform.base.errors import ConfigError

Floats = NDArray[np.float32]

# Characters read at each end of a long text, where the task is described. Reading both takes half a
# millisecond.
_HEAD = _TAIL = 500

_TABLES = ("model.embed_tokens.weight", "embed_tokens.weight", "transformer.wte.weight")
_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


class TokenEmbeddings:
    """Embedding table of a model folder, memory-mapped: loading reads only its header."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError if the folder has no tokenizer.json, or no embedding table in
        safetensors of float32, float16 or bfloat16."""
        tokenizer = folder / "tokenizer.json"
        if not tokenizer.is_file():
            raise ConfigError(f"{folder} has no tokenizer.json; give another model for embeddings")
        self._tokenizer = Tokenizer.from_file(str(tokenizer))
        self._table, self._bfloat16 = _embedding_table(folder)
        # A thousandth of the rows tells tables apart; all of them would take a second.
        seen = hashlib.sha256(tokenizer.read_bytes())
        seen.update(np.ascontiguousarray(self._table[::997]).tobytes())
        self.digest = seen.hexdigest()

    @property
    def dimensions(self) -> int:
        return int(self._table.shape[1])

    def tokens(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False))

    def mean(self, text: str) -> Floats:
        """Mean embedding of a text's tokens, shape ``[dimensions]``; zeros for an empty text."""
        if len(text) > _HEAD + _TAIL:
            text = f"{text[:_HEAD]} {text[-_TAIL:]}"
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if not ids:
            return np.zeros(self.dimensions, np.float32)
        rows = self._table[ids]
        if self._bfloat16:  # the upper half of a float32
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        mean: Floats = rows.mean(axis=0, dtype=np.float32)
        return mean


def _embedding_table(folder: Path) -> tuple[NDArray[Any], bool]:
    """The table, shape ``[vocabulary, dimensions]``, and whether its numbers are bfloat16."""
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            name = next((name for name in _TABLES if name in header), None)
            if name is None or header[name]["dtype"] not in _DTYPES:
                continue
        kind, (begin, _), shape = (header[name][key] for key in ("dtype", "data_offsets", "shape"))
        table = np.memmap(path, _DTYPES[kind], "r", 8 + length + begin, tuple(shape))
        return table, kind == "BF16"
    raise ConfigError(
        f"{folder} has no embedding table ({' or '.join(_TABLES)}) in float32, float16 or "
        "bfloat16; give another model for embeddings, such as demo"
    )
