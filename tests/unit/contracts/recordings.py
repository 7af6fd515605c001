"""What users see, compared with what they saw when it was recorded.

A recording is renewed on purpose, by the command that a failing test names, and its difference read
in the commit.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

UPDATE_VARIABLE = "UPDATE_RECORDINGS"
COMMAND = f"{UPDATE_VARIABLE}=1 .venv/bin/python -m pytest tests/unit/contracts"
_FOLDER = Path(__file__).parent / "recorded"
_SHOWN_LINES = 60

_OTHERWISE_EACH_TIME = {
    "pid", "engine_pid", "created", "created_at", "expires_at", "completed_at", "finalizing_at",
    "in_progress_at", "cancelled_at", "cancelling_at", "measured_at", "at", "uptime_s", "age_s",
    "idle_s", "ended", "from", "to", "memory_bytes", "step_time_s", "kv_cache_usage",
    "oldest_waiting_s", "attention_s", "linear_s", "prefill_s", "weighted_turnaround",
    "requests", "tokens", "running", "waiting", "waiting_tokens", "in_flight",
    "vllm", "ray", "python", "loomserve", "eta_s", "device_seconds",
}  # fmt: skip
"""Names of fields with clocks, processes, versions, or what a replica said at some moment."""
_IDS = (
    (re.compile(r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b"), "ID"),
    (re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?"), "TIME"),
    (re.compile(r"(?<=[_-])[0-9a-f]{8,}(?![0-9A-Za-z])|(?<![0-9A-Za-z])[0-9a-f]{16,}"), "ID"),
)


def masked(value: Any, name: str = "", places: Mapping[str, str] | None = None) -> Any:
    """The same without what is otherwise each time: of that its type is left.

    A number that is no multiple of 1/64 was measured: those that tests report are chosen so.

    Args:
        value: JSON.
        name: of the field that has it.
        places: parts of texts that are otherwise each time, and what stands for each.
    """
    match value:
        case dict():
            return {key: masked(each, key, places) for key, each in value.items()}
        case list():
            return [masked(each, "", places) for each in value]
        case None | bool():
            return value
        case float() if name in _OTHERWISE_EACH_TIME or value * 64 % 1:
            return "<float>"
        case int() | str() if name in _OTHERWISE_EACH_TIME:
            return f"<{type(value).__name__}>"
        case str():
            for place, stands_for in (places or {}).items():
                value = value.replace(place, stands_for)
            for pattern, stands_for in _IDS:
                value = pattern.sub(stands_for, value)
    return value


def check(name: str, found: Any) -> None:
    """Compare with the recording of this name, or record it where that is asked for."""
    path = _FOLDER / f"{name}.json"
    now = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False).splitlines()
    if os.environ.get(UPDATE_VARIABLE):
        path.write_text("\n".join(now) + "\n")
        return
    before = path.read_text().splitlines() if path.exists() else []
    changed = list(difflib.unified_diff(before, now, "recorded", "now", n=4, lineterm=""))
    told = "\n".join(changed[:_SHOWN_LINES])
    assert not changed, (
        f"What users see has changed ({path.name}). If that is meant, renew the recording and "
        f"commit it:\n    {COMMAND}\n{told}"
    )


def families(page: str) -> dict[str, Any]:
    """Families of a metrics page: type, help and labels of each."""
    return {
        family.name: {
            "type": family.type,
            "help": family.documentation,
            "samples": sorted(
                {f"{one.name}{{{','.join(sorted(one.labels))}}}" for one in family.samples}
            ),
        }
        for family in text_string_to_metric_families(page)
        if not family.name.startswith(("python_", "process_"))
    }
