"""The fields of each endpoint's requests: which vLLM 0.32 obeys, which do nothing, their values.

Held to vLLM's own request classes by ``tests/unit/platform/requests/engine/test_fields.py``. vLLM
reads "+16", 16.0 and "1_6" as 16. Here whole numbers are JSON's, so that what is counted is what is
computed.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from loomserve.platform.base.errors import BadRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
EMBEDDINGS = "/v1/embeddings"
TEXT_ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
"""Endpoints that generate text."""


def is_of_messages(path: str) -> bool:
    return path == MESSAGES or path.startswith(MESSAGES + "/")


def names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EVERYWHERE = names("model stream temperature top_p top_k cache_salt vllm_xargs watermarking")
# Of chat and completions.
_SAMPLED = names("""
    n max_tokens min_tokens seed stop stop_token_ids include_stop_str_in_output ignore_eos
    frequency_penalty presence_penalty repetition_penalty length_penalty min_p logit_bias
    logprobs prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo use_beam_search
    skip_special_tokens spaces_between_special_tokens add_special_tokens response_format
    structured_outputs truncate_prompt_tokens truncation_side thinking_token_budget priority
    return_tokens_as_token_ids return_token_ids return_token_offsets repetition_detection
    routed_experts_prompt_start
    """)
_CHAT_TEMPLATE = names("""
    chat_template chat_template_kwargs add_generation_prompt continue_final_message
    add_special_tokens media_io_kwargs mm_processor_kwargs
    """)

PASSED_ON: Mapping[str, frozenset[str]] = {
    CHAT: _EVERYWHERE
    | _SAMPLED
    | _CHAT_TEMPLATE
    | names("""
        messages tools tool_choice parallel_tool_calls max_completion_tokens top_logprobs
        reasoning_effort include_reasoning documents return_prompt_text
        """),
    COMPLETIONS: _EVERYWHERE | _SAMPLED | {"prompt", "prompt_embeds", "suffix"},
    RESPONSES: _EVERYWHERE
    | names("""
        input instructions max_output_tokens text tools tool_choice parallel_tool_calls include
        top_logprobs reasoning include_reasoning truncation stop seed ignore_eos logit_bias
        skip_special_tokens include_stop_str_in_output presence_penalty frequency_penalty
        repetition_penalty structured_outputs chat_template_kwargs media_io_kwargs
        mm_processor_kwargs enable_response_messages priority
        min_p stop_token_ids
        """),
    MESSAGES: _EVERYWHERE
    | names("""
        messages system max_tokens stop_sequences tools tool_choice output_config
        chat_template_kwargs
        """),
    EMBEDDINGS: _CHAT_TEMPLATE
    | names("""
        model input messages encoding_format dimensions embed_dtype endianness use_activation
        truncate_prompt_tokens truncation_side padding cache_salt priority
        """),
}
"""What vLLM gets and obeys, or refuses by itself where a model or a request rules it out."""

WITHOUT_EFFECT = names("""
    user metadata safety_identifier service_tier prompt_cache_key prompt_cache_retention
    request_id session_id stream_options stream_interval max_tool_calls prediction
    """)
"""Fields that change no answer: taken, and ignored where vLLM has no use for them."""

PLATFORMS_OWN = ("kv_transfer_params", "ec_transfer_params")
"""The platform's channel to its engines: vLLM knows these fields, and clients may not set them."""

_INTEGERS = names("""
    n max_tokens max_completion_tokens max_output_tokens min_tokens top_logprobs
    prompt_logprobs priority truncate_prompt_tokens thinking_token_budget stream_interval
    routed_experts_prompt_start max_tool_calls seed top_k dimensions
    """)
_BOOLEANS = names("""
    stream echo use_beam_search include_reasoning parallel_tool_calls ignore_eos
    include_stop_str_in_output skip_special_tokens spaces_between_special_tokens
    add_special_tokens add_generation_prompt continue_final_message return_tokens_as_token_ids
    return_token_ids return_token_offsets return_prompt_text watermarking
    enable_response_messages use_activation
    """)
INTEGERS: Mapping[str, frozenset[str]] = {
    path: _INTEGERS | {"logprobs"} if path == COMPLETIONS else _INTEGERS for path in PASSED_ON
}
BOOLEANS: Mapping[str, frozenset[str]] = {
    path: _BOOLEANS | {"logprobs"} if path == CHAT else _BOOLEANS for path in PASSED_ON
}


MOST_FIELDS = 256
MOST_ENTRIES = 1024
"""Of a list or object in a field, and of each directly within it."""
MOST_BAD_WORDS = 128
MOST_BAD_WORD_CHARACTERS = 64
"""vLLM tokenises each twice, on the event loop, before it looks how many there are."""
MOST_STOP_CHARACTERS = 1024
"""Of one text that ends an answer."""

# As many as a vocabulary has tokens. Nothing looks at each on its own.
_MOST = {"allowed_token_ids": 2**18, "bad_words": MOST_BAD_WORDS}
_CHARACTERS = {
    "bad_words": MOST_BAD_WORD_CHARACTERS,
    "stop": MOST_STOP_CHARACTERS,
    "stop_sequences": MOST_STOP_CHARACTERS,
}
_LEAST_NUMBER, _MOST_NUMBER = -(2**63), 2**63 - 1


def check_values(path: str, fields: Mapping[str, Any], texts: Container[str] = ()) -> None:
    """Raises BadRequest for a number or switch written as something else, a number beyond 64 bits,
    and too many or too long entries; those of ``texts`` may be many."""
    if len(fields) > MOST_FIELDS:
        raise BadRequest(
            f"the request has {len(fields)} fields, of which it may have {MOST_FIELDS}"
        )
    for name, value in fields.items():
        _check_kind(path, name, value)
        if isinstance(value, int | float):
            # vLLM makes whole numbers of some fractions.
            _check_number(name, value)
        elif isinstance(value, dict | list) and name not in texts:
            _check_entries(name, value)
        for text in value if isinstance(value, list) and name in _CHARACTERS else (value,):
            if isinstance(text, str) and len(text) > (most := _CHARACTERS.get(name, len(text))):
                raise BadRequest(
                    f"{name} has a text of {len(text)} characters, of which {most} are allowed; "
                    "give a shorter one",
                    param=name,
                )


def _check_kind(path: str, name: str, value: Any) -> None:
    if value is None or path not in INTEGERS:
        return
    if name in INTEGERS[path] and type(value) is not int:
        raise BadRequest(
            f"{name} must be a whole number in JSON, such as 16: no quotes, no point", param=name
        )
    if name in BOOLEANS[path] and type(value) is not bool:
        raise BadRequest(f"{name} must be true or false, without quotes", param=name)


def _check_entries(name: str, value: dict[str, Any] | list[Any]) -> None:
    entries = value.values() if isinstance(value, dict) else value
    sizes = [(len(value), _MOST.get(name, MOST_ENTRIES))]
    sizes += [(len(one), MOST_ENTRIES) for one in entries if isinstance(one, dict | list)]
    for size, most in sizes:
        if size > most:
            raise BadRequest(
                f"{name} has {size} entries, of which {most} are allowed; give fewer", param=name
            )
    for one in entries:
        if type(one) is int:
            _check_number(name, one)


def _check_number(name: str, value: float) -> None:
    if value < _LEAST_NUMBER or value > _MOST_NUMBER:
        raise BadRequest(f"{name} has a number beyond 64 bits; give a smaller one", param=name)
