"""What users see without a platform: the configuration, the command, the admin API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from loomserve.platform.cli.main import app
from loomserve.platform.config import Config
from loomserve.platform.config.reference import describe
from tests.unit.contracts.recordings import check, families
from tests.unit.deployments.gateway.test_admin import built
from tests.unit.test_metrics import page_of_everything


async def _unasked(*_: Any) -> Any:
    raise AssertionError("nobody is asked")


def inlined(schema: dict[str, Any]) -> Any:
    """A schema with what it refers to in place, and without the names of classes and functions."""
    parts = schema.get("$defs") or schema.get("components", {}).get("schemas", {})

    def inline(value: Any, within: tuple[str, ...], *, of_fields: bool = False) -> Any:
        if isinstance(value, list):
            return [inline(each, within) for each in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value and not of_fields:
            name = value["$ref"].rpartition("/")[2]
            rest = {key: each for key, each in value.items() if key != "$ref"}
            if name in within:
                return rest | {"recursive": True}
            return inline(parts[name] | rest, (*within, name))
        return {
            key: inline(each, within, of_fields=key in ("properties", "paths"))
            for key, each in value.items()
            if of_fields or key not in ("$defs", "components", "title", "operationId", "mapping")
        }

    return inline(schema, ())


def test_the_configuration_has_the_recorded_fields() -> None:
    check("configuration", inlined(Config.model_json_schema()))


def test_the_configuration_is_described_as_recorded() -> None:
    check("configuration_described", describe().splitlines())


def test_the_admin_api_is_described_as_recorded() -> None:
    check("admin_api", _shortened(inlined(built(_unasked).openapi())["paths"], "", {}))


def _shortened(value: Any, place: str, first: dict[str, str]) -> Any:
    """The same, where an object with the fields of an earlier one is named by that one's place."""
    if isinstance(value, list):
        return [_shortened(each, f"{place}/{at}", first) for at, each in enumerate(value)]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("properties"), dict):
        as_at = first.setdefault(json.dumps(value, sort_keys=True), place)
        if as_at != place:
            return {"as at": as_at}
    return {key: _shortened(each, f"{place}/{key}", first) for key, each in value.items()}


def test_the_command_has_the_recorded_commands_and_options() -> None:
    check("command", dict(_helps(get_command(app))))


def test_all_metrics_are_those_recorded() -> None:
    check("metrics_of_all", families(page_of_everything()))


def _helps(command: Any, *path: str) -> Iterator[tuple[str, list[str]]]:
    """What ``--help`` prints for a command and those below it."""
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    yield " ".join(("loomserve", *path)), [line.rstrip() for line in shown.output.splitlines()]
    for name, each in getattr(command, "commands", {}).items():
        yield from _helps(each, *path, name)
