"""Fields that other servers and other versions obey, and nothing here: what to send instead.

They would change the answer, so a request that sets one is refused instead of answered as if it had
not. ``docs/requests.md`` has the table.
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
    """A field that is refused, unless its value asks for nothing.

    Attributes:
        instead: What to send in its place, or where it is obeyed; completes "field: …".
        off: Values beside null, [] and {} that ask for nothing.
    """

    instead: str
    off: tuple[Any, ...] = OFF

    def is_off(self, value: Any) -> bool:
        """Whether the value asks for nothing. true and 1 are two values, as false and 0."""
        if value is None or value == [] or value == {}:
            return True
        return any(
            value == off and isinstance(value, bool) is isinstance(off, bool) for off in self.off
        )


_TOOLS = "describe the functions in tools, and choose with tool_choice"
_STATELESS = "nothing is kept between requests: send the whole conversation"
_SAMPLERS = "vLLM has no such sampler; temperature, top_p, top_k, min_p and the penalties are here"
_TEMPLATE = "chat_template_kwargs has what a model's template knows, such as enable_thinking"
_ONE_ANSWER = "n asks for several answers, all of which come back"
_LENGTH = "the bound of an answer is max_tokens (/v1/responses: max_output_tokens)"
_SEARCH = "nobody searches the web here; describe a function in tools, and run it yourself"
_PREFIX = "write the prefix that the model's card asks for into the text"

REFUSED: Mapping[str, RefusedField] = {
    # Earlier versions of vLLM.
    "guided_json": RefusedField("use structured_outputs.json"),
    "guided_regex": RefusedField("use structured_outputs.regex"),
    "guided_choice": RefusedField("use structured_outputs.choice"),
    "guided_grammar": RefusedField("use structured_outputs.grammar"),
    "guided_json_object": RefusedField("use structured_outputs.json_object"),
    "guided_decoding_backend": RefusedField("the operator sets the backend; leave it out"),
    "guided_decoding_disable_fallback": RefusedField("use structured_outputs.disable_fallback"),
    "guided_decoding_disable_any_whitespace": RefusedField(
        "use structured_outputs.disable_any_whitespace"
    ),
    "guided_decoding_disable_additional_properties": RefusedField(
        "use structured_outputs.disable_additional_properties"
    ),
    "guided_whitespace_pattern": RefusedField("use structured_outputs.whitespace_pattern"),
    "structural_tag": RefusedField("use structured_outputs.structural_tag"),
    "best_of": RefusedField(_ONE_ANSWER, (1,)),
    "logits_processors": RefusedField("clients bring no code; logit_bias and bad_words are here"),
    "logit_processors": RefusedField("clients bring no code; logit_bias and bad_words are here"),
    # OpenAI.
    "functions": RefusedField(_TOOLS),
    "function_call": RefusedField(_TOOLS, ("none",)),
    "store": RefusedField(f"{_STATELESS}, with store: false", (False,)),
    "previous_response_id": RefusedField(_STATELESS),
    "previous_input_messages": RefusedField(_STATELESS),
    "conversation": RefusedField(_STATELESS),
    "context_management": RefusedField("send as much of the conversation as the model shall see"),
    "background": RefusedField("a batch (/v1/batches) is computed in the background", (False,)),
    "modalities": RefusedField("models answer in text; leave it out", (["text"],)),
    "audio": RefusedField("models answer in text; leave it out"),
    "web_search_options": RefusedField(_SEARCH),
    "verbosity": RefusedField("ask for it in the prompt", ("medium",)),
    "moderation": RefusedField("nobody moderates here; leave it out"),
    # Anthropic.
    "output_format": RefusedField("use output_config.format"),
    "mcp_servers": RefusedField("nobody calls servers here; describe their functions in tools"),
    "container": RefusedField("nothing runs code here; describe a function in tools"),
    # Hosts of models: DashScope, DeepSeek, Mistral, OpenRouter, Perplexity.
    "enable_thinking": RefusedField("use chat_template_kwargs.enable_thinking", ()),
    "thinking": RefusedField(_TEMPLATE),
    "thinking_budget": RefusedField("use thinking_token_budget"),
    "enable_search": RefusedField(_SEARCH),
    "search_domain_filter": RefusedField(_SEARCH),
    "search_recency_filter": RefusedField(_SEARCH),
    "random_seed": RefusedField("use seed", ()),
    "safe_prompt": RefusedField("write it into the system message"),
    "prompt_mode": RefusedField(_TEMPLATE),
    "models": RefusedField("model names one model, or an alias of several"),
    "transforms": RefusedField("use truncate_prompt_tokens"),
    "plugins": RefusedField(_SEARCH),
    "top_a": RefusedField(_SAMPLERS),
    # Ollama.
    "format": RefusedField("use response_format (/v1/responses: text.format)", ("",)),
    "options": RefusedField("its entries are fields of the request, num_predict as max_tokens"),
    "think": RefusedField(f"{_TEMPLATE}; reasoning_effort is here", ()),
    "template": RefusedField("chat_template is vLLM's, where the operator trusts clients with it"),
    "raw": RefusedField("/v1/completions takes a prompt as it is"),
    "context": RefusedField(_STATELESS),
    "images": RefusedField("send them as image_url in a message's content"),
    "num_ctx": RefusedField("the model has its context; truncate_prompt_tokens cuts prompts"),
    "num_predict": RefusedField(_LENGTH, (-1,)),
    # llama.cpp.
    "grammar": RefusedField("use structured_outputs.grammar"),
    "json_schema": RefusedField("use response_format, or structured_outputs.json"),
    "n_predict": RefusedField(_LENGTH, (-1,)),
    "n_probs": RefusedField("use logprobs"),
    "n_keep": RefusedField("use truncate_prompt_tokens"),
    "min_keep": RefusedField(_SAMPLERS),
    "samplers": RefusedField(_SAMPLERS),
    "repeat_penalty": RefusedField("use repetition_penalty", (1,)),
    "repeat_last_n": RefusedField("repetition_penalty looks at the whole text", ()),
    "penalize_nl": RefusedField("use logit_bias"),
    "penalty_prompt": RefusedField("repetition_penalty looks at the prompt and the answer"),
    "mirostat": RefusedField(_SAMPLERS),
    "mirostat_mode": RefusedField(_SAMPLERS),
    "mirostat_tau": RefusedField(_SAMPLERS),
    "mirostat_eta": RefusedField(_SAMPLERS),
    "typical_p": RefusedField(_SAMPLERS, (1,)),
    "tfs_z": RefusedField(_SAMPLERS, (1,)),
    "top_n_sigma": RefusedField(_SAMPLERS, (-1,)),
    "xtc_probability": RefusedField(_SAMPLERS),
    "xtc_threshold": RefusedField(_SAMPLERS),
    "dynatemp_range": RefusedField(_SAMPLERS),
    "dynatemp_exponent": RefusedField(_SAMPLERS, (1,)),
    "dry_multiplier": RefusedField(_SAMPLERS),
    "dry_base": RefusedField(_SAMPLERS),
    "dry_allowed_length": RefusedField(_SAMPLERS),
    "dry_penalty_last_n": RefusedField(_SAMPLERS),
    "dry_sequence_breakers": RefusedField(_SAMPLERS),
    "adaptive_target": RefusedField(_SAMPLERS, (-1,)),
    "lora": RefusedField("model names an adapter"),
    "input_prefix": RefusedField("write it into the prompt"),
    "input_suffix": RefusedField("write it into the prompt"),
    "input_extra": RefusedField("write it into the prompt"),
    "reasoning_format": RefusedField("include_reasoning says whether it comes back", ("auto",)),
    # TGI, Transformers.
    "inputs": RefusedField("use messages, or prompt of /v1/completions", ()),
    "parameters": RefusedField("its entries are fields of the request"),
    "max_new_tokens": RefusedField(_LENGTH),
    "min_new_tokens": RefusedField("use min_tokens"),
    "max_length": RefusedField(_LENGTH),
    "min_length": RefusedField("use min_tokens"),
    "do_sample": RefusedField("temperature 0 is greedy, and above it samples", (True,)),
    "num_beams": RefusedField("use_beam_search with n is here", (1,)),
    "num_return_sequences": RefusedField("use n", (1,)),
    "return_full_text": RefusedField("use echo"),
    "no_repeat_ngram_size": RefusedField("use repetition_penalty or repetition_detection"),
    "encoder_repetition_penalty": RefusedField("use repetition_penalty", (1,)),
    "guidance_scale": RefusedField(_SAMPLERS, (1,)),
    "penalty_alpha": RefusedField(_SAMPLERS),
    "epsilon_cutoff": RefusedField(_SAMPLERS),
    "eta_cutoff": RefusedField(_SAMPLERS),
    "smoothing_factor": RefusedField(_SAMPLERS),
    "early_stopping": RefusedField("use length_penalty"),
    "eos_token_id": RefusedField("use stop_token_ids", ()),
    "stopping_strings": RefusedField("use stop"),
    "stop_strings": RefusedField("use stop"),
    "top_n_tokens": RefusedField("use logprobs"),
    "watermark": RefusedField("nothing marks answers here; leave it out"),
    "decoder_input_details": RefusedField("use prompt_logprobs"),
    # Cohere.
    "message": RefusedField("it is an entry of messages"),
    "chat_history": RefusedField("its entries are messages"),
    "preamble": RefusedField("it is a message of the role system"),
    "connectors": RefusedField(_SEARCH),
    "p": RefusedField("use top_p"),
    "k": RefusedField("use top_k"),
    # SGLang, LMDeploy.
    "regex": RefusedField("use structured_outputs.regex"),
    "ebnf": RefusedField("use structured_outputs.grammar"),
    "stop_regex": RefusedField("use stop"),
    "no_stop_trim": RefusedField("use include_stop_str_in_output"),
    "separate_reasoning": RefusedField("include_reasoning says whether it comes back", (True,)),
    "lora_path": RefusedField("model names an adapter"),
    "custom_logit_processor": RefusedField("clients bring no code; logit_bias is here"),
    "return_hidden_states": RefusedField("no endpoint of text has them; leave it out"),
    "sampling_params": RefusedField("its entries are fields of the request"),
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

OFF_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "top_k": (0, -1),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_special_tokens": (True, False),
    "add_generation_prompt": (True,),
    "include_reasoning": (True,),
    "parallel_tool_calls": (True, False),
    "tool_choice": ("none", "auto"),
    "truncation": ("disabled",),
    "seed": (),
}
"""Values that ask for nothing, of fields of other endpoints; where not named here, those of OFF."""


def here(path: str, name: str) -> str:
    """Where a field of another endpoint that generates text is obeyed."""
    if same := SAME.get(name, {}).get(path):
        return f"use {same}"
    return f"{next(other for other in TEXT_ENDPOINTS if name in PASSED_ON[other])} has it"
