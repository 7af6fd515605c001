"""The families of models whose form vLLM can read, the most particular first.

A family is known by what its chat template writes, or by its architecture. Parser names are vLLM's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Models that one parser reads."""

    parser: str
    marks: tuple[str, ...] = ()
    """What their template writes, all of it."""
    without: tuple[str, ...] = ()
    models: frozenset[str] = frozenset()
    """Their ``model_type`` or architecture is one of these, if any is given."""
    ending: str = ""
    """What their template ends with where an answer begins."""
    tokens: tuple[str, ...] = ()
    """What their tokenizer must have as one token each, since the parser looks it up."""
    package: str = ""
    """The Python package that the parser imports, if vLLM does not install it."""


def _models(*names: str) -> frozenset[str]:
    return frozenset(names)


_GPT_OSS = _models("gpt_oss")
_ERNIE = _models("ernie4_5", "ernie4_5_moe", "ernie4_5_vl_moe", "ernie4_5_moe_vl")
_HUNYUAN = _models("hunyuan_v1_moe", "hunyuan_v1_dense", "hunyuan")
_MIMO = _models("mimo", "mimo_v2", "mimo_v2_flash", "mimo_v2_omni")
_STEP3P5 = _models("step3p5", "step3p7")
_LAGUNA = _models("laguna", "LagunaForCausalLM")
_LING = _models("bailing_moe_v3", "BailingMoeV3ForCausalLM")
_KIMI_K3 = _models("kimi_k3", "KimiK3ForConditionalGeneration")
_DEEPSEEK_V4 = _models("deepseek_v4", "DeepseekV4ForCausalLM")
_DEEPSEEK_V32 = _models("deepseek_v32", "DeepseekV32ForCausalLM")
_INKLING = _models("inkling", "InklingForCausalLM", "InklingForConditionalGeneration")
_DEEPSEEK_CALLS = (
    "<\uff5ctool▁calls▁begin\uff5c>",
    "<\uff5ctool▁calls▁end\uff5c>",
    "<\uff5ctool▁call▁begin\uff5c>",
    "<\uff5ctool▁call▁end\uff5c>",
)
_QWEN3 = _models("qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe")
_MELODY = "cohere_melody"

TOOL_CALLS = (
    # Forms that have no template: the tokenizer writes them.
    Family("openai", models=_GPT_OSS),
    Family("kimi_k3", models=_KIMI_K3),
    Family("deepseek_v4", models=_DEEPSEEK_V4),
    Family("deepseek_v32", models=_DEEPSEEK_V32),
    Family("inkling", models=_INKLING),
    Family("hy_v3", models=_models("hy_v3", "HYV3ForCausalLM")),
    Family("hy_v4", models=_models("hy_v4", "HYV4ForCausalLM")),
    # Marks that are one family's own.
    Family("mistral", ("[TOOL_CALLS]",), tokens=("[TOOL_CALLS]",)),
    Family("kimi_k3", ("<|open|>", "<|sep|>")),
    Family("kimi_k2", ("<|tool_calls_section_begin|>",)),
    Family("deepseek_v4", ("\uff5cDSML\uff5ctool_calls",)),
    Family("deepseek_v32", ("\uff5cDSML\uff5cfunction_calls",)),
    Family("deepseek_v3", (_DEEPSEEK_CALLS[0], "```json"), tokens=_DEEPSEEK_CALLS),
    Family("deepseek_v31", (_DEEPSEEK_CALLS[0],), ("```json",), tokens=_DEEPSEEK_CALLS),
    Family("step3", ("<\uff5ctool_calls_begin\uff5c>",)),
    Family("gemma4", ("<|tool_call>",)),
    Family("functiongemma", ("<start_function_call>",)),
    Family("minimax_m3", ("]<]minimax[>[",)),
    Family("minimax_m2", ("<minimax:tool_call>",)),
    Family("seed_oss", ("<seed:tool_call>",)),
    Family("longcat", ("<longcat_tool_call>",)),
    Family("dots", ("<dots_function_call>",)),
    Family("muse_glimmer", ("<atem:invoke",)),
    Family("apertus", ("<|tools_prefix|>",)),
    Family("cohere_command3", ("<|START_ACTION|>",), package=_MELODY),
    Family("lfm2", ("<|tool_call_start|>",), tokens=("<|tool_call_start|>", "<|tool_call_end|>")),
    Family("gigachat3", ("function call<|role_sep|>",)),
    Family("gigachat3", ("<|function_call|>", "<|message_sep|>")),
    Family("internlm", ("<|action_start|>",)),
    Family("internlm", models=_models("internlm2", "internlm3")),
    Family("phi4_mini_json", ("<|tool|>",)),
    Family("phi4_mini_json", ("functools",)),
    # Marks that several families write.
    Family("granite4", ("<tool_call>", "<|start_of_role|>")),
    Family("granite", ("<|tool_call|>", "<|start_of_role|>")),
    Family("granite-20b-fc", ("<function_call>",), models=_models("gpt_bigcode", "granite")),
    Family("jamba", models=_models("jamba"), tokens=("<tool_calls>", "</tool_calls>")),
    Family("hunyuan_a13b", models=_HUNYUAN),
    Family("poolside_v1", ("<arg_key>",), models=_LAGUNA),
    Family("ling3", ("<arg_key>",), models=_LING),
    Family("glm47", ("<arg_key>",)),
    Family("minicpm5", ("<function name=",)),
    Family("step3p5", ("<function=", "<parameter="), models=_STEP3P5),
    Family("mimo", ("<function=", "<parameter="), models=_MIMO),
    Family("qwen3_coder", ("<function=", "<parameter=")),
    Family("olmo3", ("<function_calls>",)),
    Family("ernie45", ("<tool_call>",), models=_ERNIE),
    Family("xlam", ("xLAM",)),
    Family("llama4_pythonic", ("func_name1(",), models=_models("llama4", "llama4_text")),
    Family("pythonic", ("func_name1(",)),
    Family("hermes", ("<tool_call>",)),
    Family("llama3_json", ("ipython", "<|start_header_id|>"), tokens=("<|python_tag|>",)),
    Family("llama4_json", ("ipython", "<|header_start|>"), tokens=("<|python_tag|>",)),
    Family("llama4_pythonic", ("ipython", "<|header_start|>")),
    # Turns without a word of tools: most who call tools in such turns do it in this form.
    Family("hermes", ("<|im_start|>",), ("tools", "tool_calls")),
)

_THINK = ("<think>", "</think>")

REASONING = (
    Family("openai_gptoss", models=_GPT_OSS),
    Family("kimi_k3", models=_KIMI_K3),
    Family("deepseek_v4", models=_DEEPSEEK_V4),
    Family("deepseek_v3", models=_DEEPSEEK_V32, tokens=_THINK),
    Family("inkling", models=_INKLING),
    Family("hy_v3", models=_models("hy_v3", "HYV3ForCausalLM")),
    Family("hy_v4", models=_models("hy_v4", "HYV4ForCausalLM")),
    Family("mistral", ("[THINK]",), tokens=("[THINK]", "[/THINK]", "[TOOL_CALLS]")),
    Family("kimi_k3", ("<|open|>", "<|sep|>")),
    Family("gemma4", ("<|channel>",)),
    Family("seed_oss", ("<seed:think>",)),
    Family("minimax_m3", ("<mm:think>",), tokens=("<mm:think>", "</mm:think>")),
    Family("muse_glimmer", ("<atem:invoke",)),
    Family("cohere_command3", ("<|START_THINKING|>",), package=_MELODY),
    Family("granite", ("my thought process",)),
    Family("poolside_v1", ("<think>",), models=_LAGUNA, tokens=(*_THINK, "<assistant>")),
    # A switch that is off unless a request turns it on; all others take what has no end for
    # reasoning.
    Family("deepseek_v3", ending="</think>", tokens=_THINK),
    Family("olmo3", ("<think>",), models=_models("olmo3", "Olmo3ForCausalLM")),
    Family("hunyuan_a13b", ("<think>",), models=_HUNYUAN),
    Family("minimax_m2", ("<think>", "<minimax:tool_call>"), tokens=_THINK),
    Family("kimi_k2", ("<think>", "<|tool_calls_section_begin|>"), tokens=_THINK),
    Family("ling3", ("<think>",), models=_LING, tokens=_THINK),
    Family("glm47", ("<think>", "<arg_key>"), tokens=_THINK),
    Family("ernie45", ("<think>",), models=_ERNIE, tokens=_THINK),
    Family("step3", ("<think>", "<\uff5ctool_calls_begin\uff5c>"), tokens=_THINK),
    Family("step3p5", ("<think>",), models=_STEP3P5, tokens=_THINK),
    Family("mimo", ("<think>",), models=_MIMO, tokens=_THINK),
    Family("nemotron_v3", ("<think>",), models=_models("nemotron_h"), tokens=_THINK),
    # A switch that is on unless a request turns it off.
    Family("qwen3", ("<think>", "enable_thinking"), tokens=_THINK),
    Family("qwen3", models=_QWEN3, ending="<think>", tokens=_THINK),
    # They always think, and some templates have begun it.
    Family("deepseek_r1", ending="<think>", tokens=_THINK),
    Family("deepseek_r1", ("<\uff5cAssistant\uff5c>", "</think>"), tokens=_THINK),
)
"""Whose reasoning vLLM can tell from the answer."""
