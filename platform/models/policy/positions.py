"""How long a context a model's configuration gives it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = (
    *("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
    *("max_sequence_length", "max_target_positions"),
)
# Of those, the positions are as many as the configuration says, or the type is plain.
_AS_STATED = frozenset({"", "default", "llama3", "su", "longrope", "mrope", "proportional"})


def longest_context(config: Mapping[str, Any]) -> int | None:
    """Tokens, as vLLM takes it from ``config.json``; None: that cannot be told here.

    With scaled positions (RoPE of other types than the plain one) there are more than stated.
    """
    text = config.get("text_config")
    part = {**config, **text} if isinstance(text, Mapping) else config
    stated = [part[name] for name in _NAMES if isinstance(part.get(name), int)]
    scaling = part.get("rope_scaling") or part.get("rope_parameters") or {}
    if not stated or not isinstance(scaling, Mapping):
        return None
    kind = scaling.get("rope_type", scaling.get("type", ""))
    return min(stated) if kind in _AS_STATED else None
