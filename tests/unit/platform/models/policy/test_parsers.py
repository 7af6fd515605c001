"""The parsers that are chosen for the families of models, by samples with their marks alone."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

import pytest

from loomserve.platform.models.policy.families import REASONING, TOOL_CALLS
from loomserve.platform.models.policy.parsers import ChatFiles, choose, options_of

TOKENS = frozenset(token for each in TOOL_CALLS + REASONING for token in each.tokens)

# Name; model_type or architecture; parsers of tool calls and reasoning; what the template writes;
# what it ends with where an answer begins. ~ stands for DeepSeek's wide bar.
FAMILIES = """
Qwen2.5             | qwen2            | hermes          | -             | tools <tool_call>
Qwen3               | qwen3            | hermes          | qwen3         | tools <tool_call> <think> enable_thinking
Qwen3-Thinking      | qwen3_moe        | hermes          | qwen3         | tools <tool_call> | <think>
Qwen3-Instruct      | qwen3_moe        | hermes          | -             | tools <tool_call>
Qwen3-Coder         | qwen3_moe        | qwen3_coder     | -             | tools <tool_call><function=f><parameter=a>
QwQ                 | qwen2            | hermes          | deepseek_r1   | tools <tool_call> </think> | <think>
Hermes 3            | llama            | hermes          | -             | tools <tool_call> <¦im_start¦>
SmolLM2             | llama            | hermes          | -             | <¦im_start¦>
SmolLM3             | smollm3          | hermes          | qwen3         | tools <tool_call> <think> enable_thinking
EXAONE 4            | exaone4          | hermes          | deepseek_v3   | tools <tool_call> <think> enable_thinking | </think>
Llama 3.1           | llama            | llama3_json     | -             | tools ipython <¦start_header_id¦> <¦python_tag¦>
Llama 4             | llama4           | llama4_json     | -             | tools ipython <¦header_start¦>
Llama 4, pythonic   | llama4           | llama4_pythonic | -             | tools [func_name1(params_name1=1)]
ToolACE             | llama            | pythonic        | -             | tools [func_name1(params_name1=1)]
xLAM                | llama            | xlam            | -             | tools You are of the xLAM team
Mistral             | mistral          | mistral         | -             | [AVAILABLE_TOOLS] tools [TOOL_CALLS]
Magistral           | mistral          | mistral         | mistral       | tools [TOOL_CALLS] [THINK] [/THINK]
DeepSeek-V3         | deepseek_v3      | deepseek_v3     | -             | <~tool▁calls▁begin~> ```json
DeepSeek-R1         | deepseek_v3      | deepseek_v3     | deepseek_r1   | <~tool▁calls▁begin~> ```json </think> <~Assistant~>
DeepSeek-V3.1       | deepseek_v3      | deepseek_v31    | deepseek_v3   | <~tool▁calls▁begin~> thinking </think> | </think>
DeepSeek-V3.2       | DeepseekV32ForCausalLM | deepseek_v32 | deepseek_v3 |
DeepSeek-V4         | deepseek_v4      | deepseek_v4     | deepseek_v4   |
GLM-4.5             | glm4_moe         | glm47           | glm47         | tools <tool_call>f<arg_key> <think> enable_thinking
Kimi-K2             | kimi_k2          | kimi_k2         | -             | tools <¦tool_calls_section_begin¦>
Kimi-K2-Thinking    | kimi_k2          | kimi_k2         | kimi_k2       | tools <¦tool_calls_section_begin¦> <think>
Granite 3           | granite          | granite         | granite       | tools <¦start_of_role¦> <¦tool_call¦> Here is my thought process:
Granite 4           | granitemoehybrid | granite4        | -             | tools <¦start_of_role¦> <tool_call>
Phi-4-mini          | phi3             | phi4_mini_json  | -             | <¦tool¦>tools<¦/tool¦>
gpt-oss             | gpt_oss          | openai          | openai_gptoss | tools <¦channel¦>analysis
FunctionGemma       | gemma3_text      | functiongemma   | -             | tools <start_function_call>call:f
Gemma 3             | gemma3           | -               | -             | <start_of_turn>model
Gemma 4             | gemma4           | gemma4          | gemma4        | tools <¦tool_call>call:f <¦channel>thought
InternLM2.5         | internlm2        | internlm        | -             | <¦im_start¦>
Jamba               | jamba            | jamba           | -             | tools <tool_calls>
MiniMax-M2          | minimax_m2       | minimax_m2      | minimax_m2    | tools <minimax:tool_call> <think> | <think>
Hunyuan-A13B        | hunyuan_v1_moe   | hunyuan_a13b    | hunyuan_a13b  | tools <tool_calls> <think> enable_thinking
Ernie 4.5 Thinking  | ernie4_5_moe     | ernie45         | ernie45       | tools <tool_call> <think> | <think>
Olmo 3              | olmo3            | olmo3           | olmo3         | tools <function_calls> <think>
Seed-OSS            | seed_oss         | seed_oss        | seed_oss      | tools <seed:tool_call> <seed:think>
Step-3              | step3_text       | step3           | step3         | tools <~tool_calls_begin~> <think>
Step-3.5            | step3p5          | step3p5         | step3p5       | tools <function=f><parameter=a> <think> | <think>
Nemotron 3          | nemotron_h       | qwen3_coder     | nemotron_v3   | tools <function=f><parameter=a> <think>
Nemotron, TOOLCALL  | llama            | -               | -             | tools <TOOLCALL> <¦im_start¦>
LFM2                | lfm2             | lfm2            | -             | tools <¦tool_call_start¦>
Apertus             | apertus          | apertus         | -             | tools <¦tools_prefix¦>
GigaChat 3          | deepseek_v3      | gigachat3       | -             | tools function call<¦role_sep¦>
no template         | llama            | -               | -             |
""".strip().split("\n")  # noqa: E501


def _cells(line: str) -> list[str]:
    cells = [each.strip().replace("¦", "|").replace("~", "\uff5c") for each in line.split(" |")]
    return [*cells, ""][:6]


@pytest.mark.parametrize("line", FAMILIES, ids=lambda line: str(line).split(" |")[0].strip())
def test_each_family_gets_its_parsers(line: str) -> None:
    _, kind, tool_call, reasoning, template, ending = _cells(line)
    files = ChatFiles(template, f"{ending}\n", kind, kind, TOKENS)
    chosen = choose(files, {})
    assert (chosen.tool_call.name or "-", chosen.reasoning.name or "-") == (tool_call, reasoning)
    assert chosen.tool_call.why
    assert chosen.reasoning.why


@pytest.mark.parametrize(
    ("module", "table", "families"),
    [
        ("vllm.tool_parsers", "_TOOL_PARSERS_TO_REGISTER", TOOL_CALLS),
        ("vllm.reasoning", "_REASONING_PARSERS_TO_REGISTER", REASONING),
    ],
)
def test_vllm_has_each_parser(module: str, table: str, families: tuple[object, ...]) -> None:
    source = Path(_folder(module), "__init__.py").read_text(encoding="utf-8")
    (registered,) = (
        ast.literal_eval(each.value)
        for each in ast.parse(source).body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == table
    )
    names = {each.parser for each in families}  # type: ignore[attr-defined]
    assert not names - set(registered)


def _folder(module: str) -> str:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent.joinpath(*module.split(".")[1:]))


QWEN3 = ChatFiles("{{ tools }} <tool_call> <think> enable_thinking", tokens=TOKENS)


def test_the_configuration_has_the_last_word() -> None:
    chosen = choose(QWEN3, {"tool_call_parser": "mine", "reasoning_parser": "other"})
    assert (chosen.tool_call.name, chosen.reasoning.name) == ("mine", "other")
    assert {chosen.tool_call.why, chosen.reasoning.why} == {"the configuration says"}
    assert options_of(chosen) == {
        "enable_auto_tool_choice": True, "tool_call_parser": "mine", "reasoning_parser": "other",
    }  # fmt: skip


@pytest.mark.parametrize("nothing", [None, ""])
def test_null_and_an_empty_name_are_none(nothing: str | None) -> None:
    chosen = choose(QWEN3, {"tool_call_parser": nothing, "reasoning_parser": nothing})
    assert options_of(chosen) == {
        "enable_auto_tool_choice": False, "tool_call_parser": None, "reasoning_parser": "",
    }  # fmt: skip


def test_without_automatic_choice_there_is_no_parser() -> None:
    chosen = choose(QWEN3, {"enable_auto_tool_choice": False, "tool_call_parser": "hermes"})
    assert chosen.tool_call.name is None
    assert "enable_auto_tool_choice" in chosen.tool_call.why


def test_a_reasoning_parser_among_the_structured_outputs_is_the_configurations() -> None:
    chosen = choose(QWEN3, {"structured_outputs_config": {"reasoning_parser": "glm45"}})
    assert chosen.reasoning.name == "glm45"


def test_a_parser_that_looks_up_a_token_is_chosen_only_where_it_is() -> None:
    chosen = choose(ChatFiles(QWEN3.template, tokens=frozenset({"<think>"})), {})
    assert (chosen.tool_call.name, chosen.reasoning.name) == ("hermes", None)
    assert chosen.reasoning.why == "qwen3 needs the token </think>"


def test_a_parser_whose_package_is_missing_is_named() -> None:
    files = ChatFiles("tools <|START_ACTION|>")
    assert choose(files, {}).tool_call.why == "cohere_command3 needs the package cohere_melody"
    there = ChatFiles(files.template, packages=frozenset({"cohere_melody"}))
    assert choose(there, {}).tool_call.name == "cohere_command3"


def test_a_template_without_tools_is_said_to_be_one() -> None:
    assert "not told" in choose(ChatFiles("<|im_start|>"), {}).tool_call.why
    assert "not told" not in choose(QWEN3, {}).tool_call.why


def test_a_model_that_only_embeds_has_none() -> None:
    chosen = choose(QWEN3, {"runner": "pooling"})
    assert (chosen.tool_call.name, chosen.reasoning.name) == (None, None)


def test_files_that_cannot_be_read_are_the_reason() -> None:
    assert choose(ChatFiles(problem="broken"), {}).tool_call.why == "broken"
