"""Adds up what API keys use of models, and keeps it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from loomserve.platform.config import ApiKey
from loomserve.platform.requests.usage import RequestUsage
from loomserve.platform.usage.files import UsageFiles
from loomserve.platform.usage.metrics import UsageMetrics
from loomserve.platform.usage.records import UsageRecord, minute_of

_log = logging.getLogger("ray.serve")

_Place = tuple[str, str, str]
"""Minute, key and model."""


class UsageMeter:
    """The usage of one gateway's requests. Any thread may use it."""

    def __init__(
        self,
        metrics: UsageMetrics,
        files: UsageFiles,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        Args:
            metrics: told of each request.
            files: where it is kept.
            clock: Unix seconds.
        """
        self._metrics = metrics
        self._files = files
        self._clock = clock
        self._unsaved: dict[_Place, UsageRecord] = {}
        self._paces: dict[str, _Pace] = {}
        self._lock = threading.Lock()
        self._unwritable = False

    def charge(self, key: ApiKey | None, model: str, usage: RequestUsage) -> None:
        """Count a request that ended; one that no engine gave a token for is not counted.

        Where an engine did not tell its time, the model's mean time for a token stands for it.
        """
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
        """Records from a minute to before another one: what is kept, and this gateway's rest.

        Raises:
            OSError: a file cannot be read.
        """
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
