"""Adds up what API keys use of models, and keeps it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter

from loomserve.platform.config import ApiKey
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.usage.files import UsageFiles, UsageRecord, minute_of

_log = logging.getLogger("ray.serve")

_Place = tuple[str, str, str]
"""Minute, key and model."""


class UsageMetrics:
    """Metrics by API key and model: names of the configuration, and of models that are served."""

    def __init__(self, registry: CollectorRegistry) -> None:
        labels = ["key", "model"]
        self._requests = Counter(
            "loomserve_usage_requests", "Requests that engines answered.", labels, registry=registry
        )
        self._tokens = Counter(
            "loomserve_usage_tokens",
            "Tokens as engines counted them.",
            [*labels, "kind"],
            registry=registry,
        )
        self._cached = Counter(
            "loomserve_usage_cached_tokens",
            "Tokens of prompts that the prefix cache or the KV store had.",
            labels,
            registry=registry,
        )
        self._device = Counter(
            "loomserve_usage_device_seconds",
            "The requests' shares of the time of engines' steps.",
            labels,
            registry=registry,
        )

    def used(self, record: UsageRecord) -> None:
        labels = record.key, record.model
        self._requests.labels(*labels).inc(record.requests)
        self._tokens.labels(*labels, "prompt").inc(record.prompt_tokens)
        self._tokens.labels(*labels, "completion").inc(record.completion_tokens)
        self._cached.labels(*labels).inc(record.cached_tokens)
        self._device.labels(*labels).inc(record.device_seconds)


class UsageMeter:
    """The usage of one gateway's requests. Any thread may use it."""

    def __init__(
        self, metrics: UsageMetrics, files: UsageFiles, clock: Callable[[], float] = time.time
    ) -> None:
        self._metrics = metrics
        self._files = files
        self._clock = clock
        self._unsaved: dict[_Place, UsageRecord] = {}
        self._paces: dict[str, _Pace] = {}
        self._lock = threading.Lock()
        self._unwritable = False

    def charge(self, key: ApiKey | None, model: str, usage: RequestUsage) -> None:
        """Count a request that ended; one that no engine gave a token for is not counted. Where an
        engine did not tell its time, the model's mean time for a token stands for it."""
        if not usage.begun:
            return
        pace = self._paces.setdefault(model, _Pace())
        pace.add(usage)
        record = UsageRecord(
            minute=minute_of(self._clock()),
            key=key.name if key is not None else "",
            model=model,
            requests=1,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            device_seconds=usage.device_s + usage.untimed_tokens * pace.s_per_token,
        )
        self._metrics.used(record)
        with self._lock:
            _add(self._unsaved, record)

    def save(self) -> None:
        """Keep what has not been kept yet; what cannot be written now is tried again."""
        with self._lock:
            saved, self._unsaved = self._unsaved, {}
        if not saved:
            return
        try:
            self._files.append(saved.values())
        except OSError as error:
            if not self._unwritable:
                _log.error("usage cannot be written, and waits in memory: %s", error)
            self._unwritable = True
            with self._lock:
                for record in saved.values():
                    _add(self._unsaved, record)
        else:
            self._unwritable = False

    def read(self, begin: str, end: str) -> Iterator[UsageRecord]:
        """Records from a minute to before another one, also unsaved ones of this gateway."""
        self.save()
        yield from self._files.read(begin, end)
        with self._lock:
            rest = list(self._unsaved.values())
        yield from (record for record in rest if begin <= record.minute < end)


class _Pace:
    """A model's mean time for a computed token, of those whose engine told its time."""

    def __init__(self) -> None:
        self._tokens = 0
        self._seconds = 0.0

    @property
    def s_per_token(self) -> float:
        return self._seconds / self._tokens if self._tokens else 0.0

    def add(self, usage: RequestUsage) -> None:
        self._tokens += usage.timed_tokens
        self._seconds += usage.device_s


def _add(records: dict[_Place, UsageRecord], record: UsageRecord) -> None:
    place = record.minute, record.key, record.model
    known = records.get(place)
    if known is None:
        records[place] = record
    else:
        known.add(record)
