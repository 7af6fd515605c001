"""Counts the tokens of API keys, and keeps those of the day over restarts.

What a request costs is known when its answer has ended. So one is admitted as long as a token is
left, and charged afterwards; what was taken too much is waited off before the next. The day's
limit is a count that starts again at midnight UTC.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.policy.pools import Limit, LimitKind
from loomserve.platform.access.rates import KeyRates
from loomserve.platform.access.shared_counts import Count, Counts, of_key
from loomserve.platform.base.errors import TooManyRequests
from loomserve.platform.base.files import replace_private
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.base.periodic import steady_unix_clock
from loomserve.platform.config import ApiKey, Server

_log = logging.getLogger("ray.serve")

SAVE_S = 5.0
"""A gateway that dies forgets so much of what it charged last."""
_DAY_S = 86_400
_OVER = "token_limit_exceeded"


def usage_path(server: Server) -> Path:
    """The file of the day's tokens of one platform: they differ in their ports."""
    return cache_folder() / f"tokens-{server.port}.json"


class KeyMetrics:
    """Metrics by API key; their labels are names of the configuration alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tokens = Counter(
            "loomserve_key_tokens",
            "Tokens of answers that told their usage, by whose key asked.",
            ["key", "kind"],
            registry=registry,
        )
        self._file_up = Gauge(
            "loomserve_keys_file_up",
            "1: the newest keys file is in use; 0: it is wrong, and the keys before it hold.",
            registry=registry,
        )

    def used(self, key: str, prompt: int, completion: int) -> None:
        self._tokens.labels(key, "prompt").inc(prompt)
        self._tokens.labels(key, "completion").inc(completion)

    def set_file(self, *, up: bool) -> None:
        self._file_up.set(up)


class DayUse(NamedTuple):
    """Tokens of one day, which is whole days of Unix time; the greater of two is the later."""

    day: int = 0
    tokens: int = 0

    def on(self, day: int) -> int:
        """Its tokens, if it is that day."""
        return self.tokens if self.day == day else 0


class TokenMeter:
    """Tokens that each API key has used in all gateways; used on the event loop only. The day's
    tokens outlive them in a file, which each gateway keeps."""

    def __init__(
        self,
        metrics: KeyMetrics,
        file: Path,
        *,
        counts: Counts | None = None,
        allowances: Allowances | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] | None = None,
    ) -> None:
        """
        Args:
            file: what the day's tokens are read from, and kept in.
            counts: what other gateways of the node charge; None: there is no other.
            allowances: what other nodes leave; None: there is no other.
            unix_clock: Unix seconds, for the day's; None: one that takes no steps.
        """
        self._metrics = metrics
        self._file = file
        self._shared = counts is not None
        self._rates = KeyRates(
            LimitKind.TOKENS, Count.TOKENS, counts or Counts(), allowances, clock, _OVER
        )
        self._allowances = allowances
        self._unix_clock = unix_clock or steady_unix_clock()
        self._days = _read_first(file)
        self._kept: dict[str, DayUse] = {}
        self._saved = self._text()
        self._unwritable = False

    def check(self, key: ApiKey) -> None:
        """Raise TooManyRequests unless a key may use another token."""
        if key.tokens_per_minute is not None or key.tokens_per_day is not None:
            self._take_news(key)
            self._check_day(key)
            self._rates.check(key.name, key.tokens_per_minute)

    def charge(self, key: ApiKey, prompt: int, completion: int) -> None:
        """Count the tokens of a request that ended."""
        if not (prompt or completion):
            return
        self._take_news(key)
        self._metrics.used(key.name, prompt, completion)
        self._rates.add(key.name, key.tokens_per_minute, prompt + completion)
        self._charge_day(key, prompt + completion)

    def look(self, keys: Iterable[ApiKey]) -> None:
        """Take over what other gateways have charged; to be called every ``POLL_INTERVAL_S``."""
        for key in keys:
            self._take_news(key)
        kept, self._kept = self._kept, {}
        for name, use in kept.items():
            self._days[name] = max(self._days.get(name, DayUse()), use)

    def headers(self, key: ApiKey) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of the minute's limit; none without one."""
        rate = key.tokens_per_minute
        if rate is None:
            return []
        self._take_news(key)
        left, full_in_s = self._rates.left(key.name, rate)
        return [
            (b"x-ratelimit-limit-tokens", b"%d" % rate),
            (b"x-ratelimit-remaining-tokens", b"%d" % left),
            (b"x-ratelimit-reset-tokens", b"%.3fs" % full_in_s),
        ]

    def save(self) -> None:
        """Keep the day's tokens, if they have changed; may be called in any thread."""
        try:
            if self._shared:
                # What others charged just before this one began stands there alone.
                self._kept = _read(self._file)
            text = self._text()
            if text == self._saved:
                return
            replace_private(self._file, text)
        except OSError as error:
            if not self._unwritable:
                _log.error("the day's tokens cannot be kept in %s: %s", self._file, error)
            self._unwritable = True
        else:
            self._saved, self._unwritable = text, False

    def _take_news(self, key: ApiKey) -> None:
        if news := self._rates.take_news(key.name, key.tokens_per_minute):
            self._charge_day(key, news)

    def _check_day(self, key: ApiKey) -> None:
        most, unix_s = key.tokens_per_day, self._unix_clock()
        if most is None:
            return
        day = _day_of(unix_s)
        used, midnight_s = self._days.get(key.name, DayUse()).on(day), (day + 1) * _DAY_S
        if used >= most:
            raise TooManyRequests(
                f"API key {key.name!r} has used its {most} tokens of this day. Try again "
                f"from {datetime.fromtimestamp(midnight_s, UTC):%Y-%m-%d %H:%M} UTC.",
                reason=_OVER,
                retry_after_s=midnight_s - unix_s,
            )
        limit = _day_limit(key.name, day, most)
        if self._allowances is not None and self._allowances.room(limit, used=used) < 1:
            wait_s = self._allowances.refused(limit)
            if self._allowances.is_used_up(limit):
                wait_s = midnight_s - unix_s
            raise TooManyRequests(
                f"API key {key.name!r} is over its {most} tokens of this day, over all nodes. "
                f"Try again in {wait_s:.1f} s.",
                reason=_OVER,
                retry_after_s=wait_s,
            )

    def _charge_day(self, key: ApiKey, tokens: int) -> None:
        day = _day_of(self._unix_clock())
        before = self._days.get(key.name, DayUse()).on(day)
        self._days[key.name] = DayUse(day, before + tokens)
        if self._allowances is not None and key.tokens_per_day is not None:
            # Of a node, whichever of its gateways has used them.
            limit = _day_limit(key.name, day, key.tokens_per_day)
            self._allowances.use(limit, tokens, used=before)

    def _text(self) -> str:
        day = _day_of(self._unix_clock())
        tokens: dict[str, int] = {}
        for name, use in [*self._kept.items(), *self._days.items()]:
            if use.day == day:
                tokens[name] = max(use.tokens, tokens.get(name, 0))
        return json.dumps({"day": day, "tokens": tokens})


def _day_of(unix_s: float) -> int:
    return int(unix_s // _DAY_S)


def _day_limit(name: str, day: int, most: int) -> Limit:
    return Limit(f"{of_key(name)} {day}", LimitKind.DAY, most)


def _read_first(file: Path) -> dict[str, DayUse]:
    try:
        return _read(file)
    except OSError as error:
        _log.error("the day's tokens in %s are not read, and start at none: %r", file, error)
    return {}


def _read(file: Path) -> dict[str, DayUse]:
    """Raises OSError if the file cannot be read; what it says is not lost by that."""
    try:
        kept = json.loads(file.read_text())
        day = int(kept["day"])
        return {str(name): DayUse(day, int(tokens)) for name, tokens in kept["tokens"].items()}
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.error("the day's tokens in %s are not read, and start at none: %r", file, error)
    return {}
