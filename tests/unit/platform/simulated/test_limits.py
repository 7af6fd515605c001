"""What a simulated model refuses, and what it lets through."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from loomserve.platform.simulated.options import refusal


@pytest.mark.parametrize(
    ("params", "why"),
    [
        ({"structured_outputs": StructuredOutputsParams(json="{}")}, "JSON schema"),
        ({"prompt_logprobs": 1}, "log probabilities of a prompt"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"bad_words": ["no"]}, "bad_words"),
    ],
)
def test_what_takes_a_model_is_refused_with_a_reason(params: dict[str, Any], why: str) -> None:
    said = refusal(SamplingParams(**params))
    assert said is not None
    assert why in said


def test_all_else_is_let_through() -> None:
    ordinary = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        logprobs=3,
        seed=1,
        stop=["x"],
        presence_penalty=0.1,
        min_tokens=2,
    )
    assert refusal(ordinary) is None
