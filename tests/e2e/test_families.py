"""Each family of models is served, sleeps, wakes, loses its engine, and goes, with one answer."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from loomserve.platform.requests.engine_request import FORWARDED
from tests import tiny_models
from tests.e2e.conftest import Platform, server_section, started
from tests.e2e.test_on_demand import admin, state_of, status, until
from tests.families import FAMILIES, Family

pytestmark = pytest.mark.e2e

_KILLS = 5
_CONTINUED = "loomserve_continued_requests_total"
# Of an answer, what is another one each time.
_NEW = {"id", "created", "created_at", "system_fingerprint", "usage"}


def model(family: Family, folder: Path) -> dict[str, Any]:
    made = folder / family.model
    if family.model in tiny_models.FAMILIES and not made.exists():
        tiny_models.write(family.model, made)
    return {
        "name": family.name.replace(", ", "-").replace(" ", "-"),
        "source": str(made) if made.exists() else family.model,
        "devices": ["core0"],
        "kv_cache_memory": "32MiB",
        "start": "on_demand",
        "engine": {
            "max_num_seqs": 8,
            "block_size": 32,
            "enforce_eager": True,
            "dtype": "float32",
            **family.engine,
        },
    }


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    folder = tmp_path_factory.mktemp("families")

    def configured(port: int, hashes: tuple[str, ...]) -> dict[str, Any]:
        return {
            "devices": [{"name": "core0", "cores": [min(1, (os.cpu_count() or 1) - 1)]}],
            "models": [model(each, folder) for each in FAMILIES],
            "kvstore": {"memory": "128MiB"},
            "elastic": {"residence_s": 0, "wait_timeout_s": 180},
            "server": server_section(port, hashes),
        }

    with started(folder, configured) as running:
        yield running
    shutil.rmtree(folder)


def name_of(family: Family) -> str:
    return str(model(family, Path("/nowhere"))["name"])


def answer(platform: Platform, family: Family) -> Any:
    """Whole, without what is another each time."""
    with platform.http() as http:
        response = http.post(family.endpoint, **asked(family), timeout=200)
    assert response.status_code == 200, response.text
    return _without(response.json())


def asked(family: Family, **fields: Any) -> dict[str, Any]:
    """The request, as a form if it has a file."""
    body = {"model": name_of(family), **family.body, **fields}
    if family.file is None:
        return {"json": body}
    return {"data": body, "files": {"file": ("recording.wav", family.file, "audio/wav")}}


def _without(value: Any) -> Any:
    if isinstance(value, float):
        # What is computed together moves the last digits.
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _without(each) for key, each in value.items() if key not in _NEW}
    return [_without(each) for each in value] if isinstance(value, list) else value


class _EndedError(Exception):
    """A stream has ended with an error because its engine was killed."""


def streamed(platform: Platform, family: Family, *, kill: bool) -> str:
    """All that a stream says; its engine is killed with the first words, if it is to be."""
    said: list[str] = []
    request = asked(family, stream=True)
    with platform.http() as http, http.stream("POST", family.endpoint, **request) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if kill and not family.resumed and "error" in event:
                assert "send it again" in event["error"]["message"]
                raise _EndedError
            assert "error" not in event, event
            words = _words(event)
            if words and not said and kill:
                engine(platform, family).kill()
            said += words
    return "".join(said)


def _words(event: dict[str, Any]) -> list[str]:
    """Of a chunk of a chat or a completion."""
    words = []
    for choice in event.get("choices", []):
        delta = choice.get("delta", choice)
        calls = [call["function"].get("arguments") for call in delta.get("tool_calls") or []]
        words += [delta.get("reasoning"), delta.get("content"), delta.get("text"), *calls]
    return [each for each in words if each]


def engine(platform: Platform, family: Family) -> psutil.Process:
    (replica,) = state_of(platform, name_of(family))["replicas"]
    return psutil.Process(replica["engine_pid"])


def put_away(platform: Platform, name: str, what: str, until_it_is: str) -> None:
    until(lambda: admin(platform, name, what).status_code == 200)
    until(lambda: status(platform, name) == until_it_is)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_served_sleeps_wakes_is_killed_and_goes(
    platform: Platform, family: Family
) -> None:
    if family.endpoint not in FORWARDED:
        pytest.skip(f"{family.endpoint} is not routed")
    name = name_of(family)
    first = answer(platform, family)
    before = streamed(platform, family, kill=False) if family.generates else ""
    if not family.stored:
        assert not platform.metric("loomserve_kv_blocks", model=name)
    elif family.generates:
        # Whose prompts have more than a block.
        # Models of the same weights share their blocks, which one of their names counts.
        names = {name_of(each) for each in FAMILIES if each.model == family.model}
        until(lambda: any(platform.metric("loomserve_kv_blocks", model=each) for each in names))
    put_away(platform, name, "sleep", "asleep")
    assert answer(platform, family) == first

    if family.generates:
        for _ in range(_KILLS):
            try:
                after = streamed(platform, family, kill=True)
            except _EndedError:
                break
            assert after == before or not family.continued
            if platform.metric(_CONTINUED, model=name, reason="gone"):
                break
        else:
            pytest.fail("each answer was whole")
        assert bool(platform.metric(_CONTINUED, model=name, reason="gone")) is family.resumed
    else:
        engine(platform, family).kill()
    assert answer(platform, family) == first
    put_away(platform, name, "unload", "unloaded")
