"""The fields of each endpoint's requests: which vLLM 0.32 obeys, which do nothing, of which kind.

Held to vLLM's own request classes by ``tests/unit/platform/requests/engine/test_fields.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

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
