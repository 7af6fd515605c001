"""Arms of the overhead's benchmark: what each serves with, so that a pair differs in one thing.

Both arms of a pair have as many engines, with the same flags and as much KV memory; only the
default configuration has its KV store beside that, since that is what it costs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.servers import (
    PROGRAMS,
    Arm,
    EngineFlags,
    bare_arm,
    configured_arm,
    loomserve_config,
)
from loomserve.platform import config

KINDS = {
    "bare": "vLLM's own server, one an engine",
    "one": "Loomserve with one model",
    "loomserve": "Loomserve with two models, of which one is idle",
    "lending": "likewise, and they may lend to each other",
    "default": "likewise, as the example of make serve has it: its options, and its KV store",
}
"""``loomserve:FOLDER`` is another checkout, installed there."""
DEFAULT_ARMS = ("bare", "bare", "one", "loomserve", "default")
"""The baseline, then what it is compared with; first itself, the noise floor of the method."""
FIRST_PORT = 18500
_EXAMPLE = Path(__file__).parents[1] / "examples/laptop.yaml"


@dataclass(frozen=True)
class PairOptions:
    """What both arms of a pair are started with.

    Attributes:
        flags: of each engine.
        engines: how many; all but the measured one are idle.
        store_bytes: memory of the default configuration's KV store.
    """

    flags: EngineFlags
    engines: int
    store_bytes: int


def default_options() -> PairOptions:
    """Of ``examples/laptop.yaml``; its replicas and cores are the benchmark's own.

    ``max_num_batched_tokens`` is not in it, and given to both arms as in every pair.
    """
    example = config.parse(_EXAMPLE.read_text(encoding="utf-8"))
    model = example.models[0]
    flags = EngineFlags(**model.engine, kv_cache_memory_bytes=model.kv_cache_memory)
    assert example.kvstore is not None
    return PairOptions(flags, 2, example.kvstore.memory)


def pair_options(kinds: Sequence[str], flags: EngineFlags) -> PairOptions:
    """For two arms, with flags that the default configuration has its own of."""
    options = default_options()
    if "default" not in kinds:
        options = replace(options, flags=flags)
    return replace(options, engines=1) if "one" in kinds else options


def pairs(kinds: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The baseline with each of the others."""
    for other in kinds[1:]:
        yield kinds[0], other


def comparison_name(baseline: str, other: str) -> str:
    """What a pair's figures are called; ``noise`` is the baseline against itself."""
    if other == baseline:
        return "noise"
    return "loomserve-there" if ":" in other else other


def make_arms(kinds: Sequence[str], model: str, flags: EngineFlags, logs: Path) -> list[Arm]:
    """Of a pair; nothing is started. Configurations are written to ``logs``."""
    first, second = ("loomserve-there" if ":" in kind else kind for kind in kinds)
    names = (first, f"{second}-again" if first == second else second)
    options = pair_options(kinds, flags)
    arms = []
    for number, (kind, name) in enumerate(zip(kinds, names, strict=True)):
        port = FIRST_PORT + 10 * number
        if kind == "bare":
            arms.append(bare_arm(name, model, options.flags, port, logs, options.engines))
            continue
        checkout = kind.partition(":")[2]
        written = loomserve_config(
            model,
            options.flags,
            port,
            lending="auto" if kind == "lending" else None,
            engines=options.engines,
            store_bytes=options.store_bytes if kind == "default" else None,
        )
        programs = Path(checkout, ".venv/bin").absolute() if checkout else PROGRAMS
        arms.append(configured_arm(name, written, "measured", port, logs, programs))
    return arms


def parse_kinds(text: str) -> list[str]:
    """Of a command line.

    Raises:
        argparse.ArgumentTypeError: there are fewer than two, one is not known, or not installed.
    """
    kinds = text.split(",")
    if len(kinds) < 2 or not {kind.partition(":")[0] for kind in kinds} <= KINDS.keys():
        raise argparse.ArgumentTypeError(
            f"give two or more of {', '.join(KINDS)}, the baseline first, such as bare,default"
        )
    for kind in kinds:
        checkout = kind.partition(":")[2]
        if checkout and not Path(checkout, ".venv/bin/loomserve").exists():
            raise argparse.ArgumentTypeError(f"{checkout} is not installed: run make install there")
    return kinds
