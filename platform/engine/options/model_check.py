"""Checks of a model's files and options, as far as files tell whether vLLM can serve them.

Nothing of vLLM's is imported, which takes 20 s of a core: its sources say what it knows.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from loomserve.platform.base.errors import ConfigError
from loomserve.platform.config import Model
from loomserve.platform.devices.machine import cpu_dtype
from loomserve.platform.engine.options import known
from loomserve.platform.engine.options.known import check
from loomserve.platform.models import simulated
from loomserve.platform.models.policy.model_files import (
    GENERATION_CONFIG,
    generation_problem,
    longest_context,
    template_problem,
)

_MARKS_OF_A_TEMPLATE = frozenset("{}\n")
"""vLLM takes what has one of these for the template itself, and all else for a file's path."""
_NOT_IN_FLOAT32 = {
    "awq", "auto_awq", "awq_marlin", "gptq", "auto_gptq", "gptq_marlin", "fp8", "moe_wna16",
    "modelopt", "modelopt_fp4", "mxfp4",
}  # fmt: skip
# In the place of a name: the parser is chosen, or there is none.
_UNNAMED = ("", "auto")


def check_options(model: Model) -> None:
    """Check a model's engine options by themselves. Raises ConfigError, which names each option
    that is wrong, what is, and the nearest right name."""
    check(model.name, model.engine)
    _refuse(model, _problems_of_options(model.engine))


def check_model(model: Model, folder: Path | str, *, on_cpu: bool) -> None:
    """Check a model's files, and its options against them, beyond what the options say alone.
    ``folder`` is what the catalog has found, and checked that it is whole; a hub id has no files
    here. Raises ConfigError, which names the file or the option, and what to do."""
    if isinstance(folder, Path):
        _refuse(model, _problems_of_files(model.engine, folder, on_cpu=on_cpu))


def _refuse(model: Model, problems: Iterable[str]) -> None:
    found = list(problems)
    if found:
        raise ConfigError("\n".join(f"model {model.name!r}: {each}" for each in found))


def _problems_of_options(options: Mapping[str, Any]) -> Iterator[str]:
    for option in ("tool_call_parser", "reasoning_parser"):
        parser = options.get(option)
        if parser is not None and parser not in _UNNAMED and not options.get("tool_parser_plugin"):
            yield from _unknown(option, parser)
    quantization = options.get("quantization")
    if quantization is not None:
        yield from _unknown("quantization", quantization)
    yield from _problems_of_template(options.get("chat_template"))
    override = options.get("override_generation_config")
    if isinstance(override, Mapping):
        problem = generation_problem(override)
        if problem is not None:
            yield f"engine.override_generation_config: {problem}"


def _unknown(option: str, given: object) -> Iterator[str]:
    names = known.names_for(option)
    if given in names:
        return
    near = difflib.get_close_matches(str(given), names, n=3, cutoff=0.5)
    yield (
        f"engine.{option}: vLLM knows no {given!r}; "
        + (f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else
           f"it knows {', '.join(sorted(names))}")
    )  # fmt: skip


def _problems_of_template(given: object) -> Iterator[str]:
    if not isinstance(given, str):
        return
    if _MARKS_OF_A_TEMPLATE & set(given):
        text = given
    elif Path(given).is_file():
        text = Path(given).read_text(encoding="utf-8", errors="replace")
    elif given in known.chat_templates():
        return
    else:
        yield (
            f"engine.chat_template: there is no file {given}; write its absolute path, or the "
            "template itself"
        )
        return
    if (problem := template_problem(text)) is not None:
        yield f"engine.chat_template: {problem}"


def _problems_of_files(options: Mapping[str, Any], folder: Path, *, on_cpu: bool) -> Iterator[str]:
    config = _read(folder / "config.json")
    if config.get(simulated.MARK):
        return
    yield from _problems_of_architecture(options, folder / "config.json", config)
    yield from _problems_of_length(options, folder / "config.json", config)
    yield from _problems_of_numbers(options, config, on_cpu=on_cpu)
    yield from _problems_of_defaults(options, folder)
    if options.get("chat_template") is None:
        yield from _problems_of_own_templates(folder)


def _problems_of_architecture(
    options: Mapping[str, Any], path: Path, config: Mapping[str, Any]
) -> Iterator[str]:
    names = [each for each in config.get("architectures") or () if isinstance(each, str)]
    if not names:
        return
    brings_code = options.get("trust_remote_code") and config.get("auto_map")
    changed = options.get("hf_overrides") or options.get("model_impl") == "terratorch"
    if brings_code or changed or any(map(known.is_known_architecture, names)):
        return
    if (version := known.past_architectures().get(names[0])) is not None:
        yield f"{path}: vLLM had {names[0]} until version {version}, and has it no more"
        return
    near = difflib.get_close_matches(names[0], known.architectures(), n=1, cutoff=0.8)
    yield (
        f"{path}: architecture {names[0]} is unknown to vLLM"
        + (f" (the nearest is {near[0]})" if near else "")
        + (
            "; it comes with code of its own: if you trust that, set engine.trust_remote_code"
            if config.get("auto_map")
            else "; take a model that vLLM lists as supported"
        )
    )


def _problems_of_length(
    options: Mapping[str, Any], path: Path, config: Mapping[str, Any]
) -> Iterator[str]:
    asked, most = options.get("max_model_len"), longest_context(config)
    if isinstance(asked, int) and most is not None and asked > most:
        yield (
            f"engine.max_model_len: is {asked} tokens, and the model has {most} positions "
            f"({path}); write {most} or less"
        )


def _problems_of_numbers(
    options: Mapping[str, Any], config: Mapping[str, Any], *, on_cpu: bool
) -> Iterator[str]:
    of_file = config.get("quantization_config")
    method = of_file.get("quant_method") if isinstance(of_file, Mapping) else None
    method = options.get("quantization") or method
    dtype = options.get("dtype") or (cpu_dtype() if on_cpu else "auto")
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype")
    if method in _NOT_IN_FLOAT32 and dtype in ("float32", "float"):
        why = "" if options.get("dtype") else ", as on this CPU where nothing is said"
        yield (
            f"engine.dtype: is {dtype}{why}, and weights quantised by {method} are computed in "
            "bfloat16 or float16; set engine.dtype: bfloat16"
        )


def _problems_of_defaults(options: Mapping[str, Any], folder: Path) -> Iterator[str]:
    of = options.get("generation_config", "auto")
    if of == "vllm" or not isinstance(of, str):
        return
    path = (folder if of == "auto" else Path(of)) / GENERATION_CONFIG
    problem = generation_problem(_read(path) | _overrides(options))
    if problem is not None:
        yield f"{path}: {problem}"


def _overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """Those take the place of what the file says."""
    override = options.get("override_generation_config")
    return dict(override) if isinstance(override, Mapping) else {}


def _problems_of_own_templates(folder: Path) -> Iterator[str]:
    path = folder / "chat_template.jinja"
    if path.is_file():
        templates: list[object] = [path.read_text(encoding="utf-8", errors="replace")]
    else:
        path = folder / "tokenizer_config.json"
        own = _read(path).get("chat_template")
        templates = (
            [each.get("template") for each in own if isinstance(each, Mapping)]
            if isinstance(own, list)
            else [own]
        )
    for each in templates:
        if isinstance(each, str) and (problem := template_problem(each)) is not None:
            yield f"{path}: chat template: {problem}"


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty without such a file: the catalog has checked that a folder is whole.
    Raises ConfigError if it is no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); copy the file again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: must hold one JSON object; copy the file again")
    return value
