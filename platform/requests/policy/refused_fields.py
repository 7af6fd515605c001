"""Fields that other servers and versions obey and this one does not: what to send instead.

They would change the answer, so a request that sets one is refused. ``docs/requests.md`` has the
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from loomserve.platform.requests.policy.fields import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    PASSED_ON,
    RESPONSES,
    TEXT_ENDPOINTS,
)

OFF: tuple[Any, ...] = (False, 0, "")
"""Values that ask for nothing where a field has no others."""


@dataclass(frozen=True, slots=True)
class RefusedField:
    instead: str
    """What to send in its place, or where it is obeyed; completes "field: …"."""
    off: tuple[Any, ...] = OFF

    def is_off(self, value: Any) -> bool:
        return is_off(value, self.off)


def is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """Whether a value asks for nothing. true and 1 are two values, as false and 0."""
    if value is None or value == [] or value == {}:
        return True
    return any(value == each and isinstance(value, bool) is isinstance(each, bool) for each in off)


_TEMPLATE = "chat_template_kwargs has what a model's template knows, such as enable_thinking"
_PREFIX = "write the prefix that the model's card asks for into the text"

# Names by what to send instead, as the table in docs/requests.md.
_INSTEAD = {
    "use structured_outputs.json": "guided_json",
    "use structured_outputs.regex": "guided_regex regex",
    "use structured_outputs.choice": "guided_choice",
    "use structured_outputs.grammar": "guided_grammar grammar ebnf",
    "use structured_outputs.json_object": "guided_json_object",
    "the operator sets the backend; leave it out": "guided_decoding_backend",
    "use structured_outputs.disable_fallback": "guided_decoding_disable_fallback",
    "use structured_outputs.disable_any_whitespace": "guided_decoding_disable_any_whitespace",
    "use structured_outputs.disable_additional_properties": (
        "guided_decoding_disable_additional_properties"
    ),
    "use structured_outputs.whitespace_pattern": "guided_whitespace_pattern",
    "use structured_outputs.structural_tag": "structural_tag",
    "n asks for several answers, all of which come back": "best_of",
    "clients bring no code; logit_bias and bad_words are here": (
        "logits_processors logit_processors"
    ),
    "describe the functions in tools, and choose with tool_choice": "functions function_call",
    "nothing is kept between requests: send the whole conversation, with store: false": "store",
    "nothing is kept between requests: send the whole conversation": (
        "previous_response_id previous_input_messages conversation context"
    ),
    "send as much of the conversation as the model is to see": "context_management",
    "a batch (/v1/batches) is computed in the background": "background",
    "models answer in text; leave it out": "modalities audio",
    "nobody searches the web here; describe a function in tools, and run it yourself": """
        web_search_options enable_search search_domain_filter search_recency_filter plugins
        connectors
    """,
    "ask for it in the prompt": "verbosity",
    "nobody moderates here; leave it out": "moderation",
    "use output_config.format": "output_format",
    "nobody calls servers here; describe their functions in tools": "mcp_servers",
    "nothing runs code here; describe a function in tools": "container",
    "use chat_template_kwargs.enable_thinking": "enable_thinking",
    _TEMPLATE: "thinking prompt_mode",
    "use thinking_token_budget": "thinking_budget",
    "use seed": "random_seed",
    "write it into the system message": "safe_prompt",
    "model names one model, or an alias of several": "models",
    "use truncate_prompt_tokens": "transforms n_keep",
    "vLLM has no such sampler; temperature, top_p, top_k, min_p and the penalties are here": """
        top_a min_keep samplers mirostat mirostat_mode mirostat_tau mirostat_eta typical_p
        tfs_z top_n_sigma xtc_probability xtc_threshold dynatemp_range dynatemp_exponent
        dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        adaptive_target guidance_scale penalty_alpha epsilon_cutoff eta_cutoff
        smoothing_factor
    """,
    "use response_format (/v1/responses: text.format)": "format",
    "its entries are fields of the request, num_predict as max_tokens": "options",
    f"{_TEMPLATE}; reasoning_effort is here": "think",
    "chat_template is vLLM's, where the operator trusts clients with it": "template",
    "/v1/completions takes a prompt as it is": "raw",
    "send them as image_url in a message's content": "images mm_payload return_mm_kwargs",
    "the model has its context; truncate_prompt_tokens cuts prompts": "num_ctx",
    "the bound of an answer is max_tokens (/v1/responses: max_output_tokens)": (
        "num_predict n_predict max_new_tokens max_length"
    ),
    "use response_format, or structured_outputs.json": "json_schema",
    "use logprobs": "n_probs top_n_tokens",
    "use repetition_penalty": "repeat_penalty encoder_repetition_penalty",
    "repetition_penalty looks at the whole text": "repeat_last_n",
    "use logit_bias": "penalize_nl",
    "repetition_penalty looks at the prompt and the answer": "penalty_prompt",
    "model names an adapter": "lora lora_path",
    "write it into the prompt": "input_prefix input_suffix input_extra",
    "include_reasoning says whether it comes back": "reasoning_format separate_reasoning",
    "use messages, or prompt of /v1/completions": "inputs",
    "its entries are fields of the request": "parameters sampling_params",
    "use min_tokens": "min_new_tokens min_length",
    "temperature 0 is greedy, and above it samples": "do_sample",
    "use_beam_search with n is here": "num_beams",
    "use n": "num_return_sequences",
    "use echo": "return_full_text",
    "use repetition_penalty or repetition_detection": "no_repeat_ngram_size",
    "use length_penalty": "early_stopping",
    "use stop_token_ids": "eos_token_id",
    "use stop": "stopping_strings stop_strings stop_regex",
    "nothing marks answers here; leave it out": "watermark",
    "use prompt_logprobs": "decoder_input_details",
    "it is an entry of messages": "message",
    "its entries are messages": "chat_history",
    "it is a message of the role system": "preamble",
    "use top_p": "p",
    "use top_k": "k",
    "use include_stop_str_in_output": "no_stop_trim",
    "clients bring no code; logit_bias is here": "custom_logit_processor",
    "no endpoint of text has them; leave it out": "return_hidden_states",
}
_OFF_BY_VALUES: tuple[tuple[tuple[Any, ...], str], ...] = (
    (
        (1,),
        """
        best_of repeat_penalty typical_p tfs_z dynatemp_exponent num_beams num_return_sequences
        encoder_repetition_penalty guidance_scale n repetition_penalty length_penalty
    """,
    ),
    (("none",), "function_call"),
    (("none", "auto"), "tool_choice"),
    ((False,), "store background"),
    ((["text"],), "modalities"),
    (("medium",), "verbosity"),
    ((), "enable_thinking random_seed think repeat_last_n inputs eos_token_id seed"),
    (("",), "format"),
    ((-1,), "num_predict n_predict top_n_sigma adaptive_target"),
    ((0, -1), "top_k"),
    (("auto",), "reasoning_format"),
    (
        (True,),
        """
        do_sample separate_reasoning skip_special_tokens spaces_between_special_tokens
        add_generation_prompt include_reasoning
    """,
    ),
    ((True, False), "add_special_tokens parallel_tool_calls"),
    (("disabled",), "truncation"),
)
OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    name: off for off, names in _OFF_BY_VALUES for name in names.split()
}
"""Values beside null, [] and {} that ask for nothing, of fields where they are others than OFF."""

REFUSED: Mapping[str, RefusedField] = {
    name: RefusedField(instead, OFF_VALUES.get(name, OFF))
    for instead, names in _INSTEAD.items()
    for name in names.split()
}
"""Of endpoints that generate text."""

REFUSED_EMBEDDINGS: Mapping[str, RefusedField] = {
    "input_type": RefusedField(_PREFIX),
    "prompt_name": RefusedField(_PREFIX),
    "instruction": RefusedField(_PREFIX),
    "truncate": RefusedField("use truncate_prompt_tokens", ("NONE",)),
    "truncation": RefusedField("use truncate_prompt_tokens", (False,)),
    "output_dimension": RefusedField("use dimensions"),
    "output_dtype": RefusedField("use embed_dtype and encoding_format", ("float",)),
    "embedding_types": RefusedField("use embed_dtype and encoding_format", (["float"],)),
    "late_chunking": RefusedField("send each text whole"),
    "texts": RefusedField("use input", ()),
    "inputs": RefusedField("use input", ()),
    "options": RefusedField("its entries are fields of the request"),
}
"""Of ``/v1/embeddings``: Cohere's, NIM's, Voyage's, Jina's, Ollama's."""

REFUSED_FORMS: Mapping[str, RefusedField] = {
    "n": RefusedField("only a beam search (use_beam_search) has several answers", (1,)),
    "include[]": RefusedField("no log probabilities of recordings are here; leave it out"),
    "chunking_strategy": RefusedField("recordings are cut where they are quiet", ("", "auto")),
    "known_speaker_names[]": RefusedField("speakers are not told apart; leave it out"),
    "known_speaker_references[]": RefusedField("speakers are not told apart; leave it out"),
    "timestamp_granularities[]": RefusedField(
        'times are of segments, with response_format "verbose_json"', ("", "segment")
    ),
}
"""Of transcriptions and translations, whose fields are texts."""

_AS_FORMAT = {CHAT: "response_format", RESPONSES: "text.format", MESSAGES: "output_config.format"}
_AS_EFFORT = {CHAT: "reasoning_effort", RESPONSES: "reasoning.effort",
              MESSAGES: "output_config.effort"}  # fmt: skip
_AS_PROMPT = {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input", MESSAGES: "messages"}
_AS_SYSTEM = {CHAT: "a message of the role system", RESPONSES: "instructions", MESSAGES: "system"}
_AS_LENGTH = {CHAT: "max_completion_tokens", COMPLETIONS: "max_tokens",
              RESPONSES: "max_output_tokens", MESSAGES: "max_tokens"}  # fmt: skip
_AS_STOP = {CHAT: "stop", COMPLETIONS: "stop", RESPONSES: "stop", MESSAGES: "stop_sequences"}
_AS_LOGPROBS = {
    CHAT: "logprobs and top_logprobs",
    COMPLETIONS: "logprobs",
    RESPONSES: 'top_logprobs with include: ["message.output_text.logprobs"]',
}
_AS_CUT = {CHAT: "truncate_prompt_tokens", COMPLETIONS: "truncate_prompt_tokens",
           RESPONSES: 'truncation: "auto"'}  # fmt: skip
SAME: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("response_format", "text", "output_config"), _AS_FORMAT),
    "structured_outputs": {MESSAGES: "output_config.format"},
    **dict.fromkeys(("reasoning_effort", "reasoning"), _AS_EFFORT),
    **dict.fromkeys(("messages", "prompt", "input"), _AS_PROMPT),
    **dict.fromkeys(("system", "instructions"), _AS_SYSTEM),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "max_output_tokens"), _AS_LENGTH),
    **dict.fromkeys(("stop", "stop_sequences"), _AS_STOP),
    **dict.fromkeys(("logprobs", "top_logprobs", "include"), _AS_LOGPROBS),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation"), _AS_CUT),
}
"""Fields that the endpoints name each otherwise: what each calls it."""


def here(path: str, name: str) -> str:
    """Where a field of another endpoint that generates text is obeyed."""
    if same := SAME.get(name, {}).get(path):
        return f"use {same}"
    return f"{next(other for other in TEXT_ENDPOINTS if name in PASSED_ON[other])} has it"
