"""The table of hooks into vLLM and Ray, ``hooks.toml``; ``hooks.py`` checks it."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

_TESTED = "tested"


class HookKind(StrEnum):
    """How a hook reaches into vLLM or Ray, from what is promised to what is not."""

    PUBLIC = "public"
    SUBCLASS = "subclass"
    READ = "read"
    WRITE = "write"
    REPLACE = "replace"


@dataclass(frozen=True)
class Hook:
    """One place where Loomserve depends on the inside of vLLM or Ray, as ``hooks.toml`` says."""

    target: str
    members: tuple[str, ...]
    kind: HookKind
    why: str
    owner: str

    @property
    def package(self) -> str:
        return self.target.partition(".")[0]


def _read() -> tuple[dict[str, tuple[str, ...]], tuple[Hook, ...]]:
    with Path(__file__).with_name("hooks.toml").open("rb") as file:
        read = tomllib.load(file)
    tested = {package: tuple(versions) for package, versions in read.pop(_TESTED).items()}
    return tested, tuple(
        Hook(row["target"], tuple(row["members"]), HookKind(row["kind"]), row["why"], owner)
        for owner, rows in read.items()
        for row in rows
    )


TESTED_VERSIONS, TABLE = _read()
"""By package, the version that is pinned, then others that have all hooks; and all hooks."""
