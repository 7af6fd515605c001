"""What no simulated engine can do for a request."""

from __future__ import annotations

from typing import Any

_PARAMETERS = {
    "structured_outputs": "follow a grammar or a JSON schema (response_format, tools)",
    "prompt_logprobs": "tell log probabilities of a prompt",
    "logit_bias": "weigh tokens (logit_bias)",
    "bad_words": "avoid words (bad_words)",
}


def refusal(params: Any) -> str | None:
    """Why a request with these ``SamplingParams`` cannot be answered; None: it can.

    What bends probabilities, such as top_p, changes nothing and is let through.
    """
    for name, what in _PARAMETERS.items():
        if getattr(params, name, None):
            return f"This model is simulated and cannot {what}: leave it out, or ask another model."
    return None
