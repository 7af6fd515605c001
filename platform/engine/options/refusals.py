"""Why vLLM could not make an engine, for those of its reasons that say nothing to users."""

from __future__ import annotations

from loomserve.platform.base.errors import ConfigError

_STATE_KERNEL = "causal_conv1d"
"""vLLM's kernel of layers with a state, in the error of torch that it has none for a format."""


def explained(error: Exception) -> Exception:
    """What a user can do about an error with which an engine was not made; or the error."""
    if isinstance(error, NotImplementedError) and _STATE_KERNEL in str(error):
        return ConfigError(
            "this CPU computes layers with a state, such as Mamba's, in bfloat16 only: set "
            "engine.dtype to bfloat16"
        )
    return error
