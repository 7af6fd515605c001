"""How a request says which tokens it has been answered with elsewhere."""

from __future__ import annotations

from typing import Any

RESUMED = "loomserve_resumed"
"""Key in ``SamplingParams.extra_args``: the tokens so far, at least one."""


def resumed_tokens(params: Any) -> list[int]:
    """The tokens that a request with these ``SamplingParams``, or None, has been answered with."""
    extra = getattr(params, "extra_args", None)
    tokens: list[int] = (extra or {}).get(RESUMED) or []
    return tokens


def check_resumed(request: Any, model_config: Any) -> None:
    """See that a request can go on from the tokens that it names.

    Args:
        request: vLLM's ``EngineCoreRequest``.
        model_config: vLLM's ``ModelConfig``.

    Raises:
        ValueError: they are no tokens, or leave nothing to generate.
    """
    extra = getattr(request.sampling_params, "extra_args", None) or {}
    if RESUMED not in extra:
        return
    tokens, vocabulary = extra[RESUMED], model_config.get_vocab_size()
    if not isinstance(tokens, list) or not all(
        type(token) is int and 0 <= token < vocabulary for token in tokens
    ):
        raise ValueError(f"{RESUMED} must be a list of tokens, from 0 to {vocabulary - 1}")
    if tokens and request.resumable:
        raise ValueError("a session of streamed input cannot go on in another engine")
    prompt = len(request.prompt_token_ids or ()) or len(request.prompt_embeds)
    most = min(request.sampling_params.max_tokens, model_config.max_model_len - prompt)
    if tokens and len(tokens) >= most:
        raise ValueError(f"{RESUMED} has {len(tokens)} tokens, and the answer has at most {most}")
