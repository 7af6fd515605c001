"""What a request has with it on its way to another engine: its tokens so far, and its times.

No clock of another machine can be compared with one's own. So what travels has ages: a request came
seconds ago, less than 0, and its deadline is the seconds that are left. The way itself counts as
nothing.
"""

from __future__ import annotations

import time
from copy import copy
from typing import TYPE_CHECKING, Any

from loomserve.platform.scheduling.policy.hints import DEADLINE, deadline_of

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

RESUMED = "loomserve_resumed"
"""Key in ``SamplingParams.extra_args``: the tokens so far, at least one."""


def resumed_tokens(params: Any) -> list[int]:
    """The tokens so far in these ``SamplingParams``; none for None."""
    extra = getattr(params, "extra_args", None)
    tokens: list[int] = (extra or {}).get(RESUMED) or []
    return tokens


def check_resumed(request: Any, model_config: Any) -> None:
    """Check that a request can go on from the tokens that it names. ``request`` is vLLM's
    ``EngineCoreRequest``, ``model_config`` its ``ModelConfig``. Raises ValueError if they are no
    tokens, or leave nothing to generate."""
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


def by_age(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request of this process as it is sent now."""
    return _shifted(request, -time.time(), -time.monotonic())


def by_own_clocks(request: EngineCoreRequest) -> EngineCoreRequest:
    """A request that has just been received, by the clocks of this process."""
    return _shifted(request, time.time(), time.monotonic())


def _shifted(
    request: EngineCoreRequest, arrival_later_s: float, deadline_later_s: float
) -> EngineCoreRequest:
    shifted, params = copy(request), request.sampling_params
    shifted.arrival_time = request.arrival_time + arrival_later_s
    deadline = deadline_of(params.extra_args) if params is not None else None
    if params is not None and deadline is not None:
        shifted.sampling_params = params = copy(params)
        params.extra_args = {**(params.extra_args or {}), DEADLINE: deadline + deadline_later_s}
    return shifted
