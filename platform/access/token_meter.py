"""Counts the tokens of API keys, and keeps those of the day over restarts."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from loomserve.platform.access.allowances import Allowances
from loomserve.platform.access.metrics import KeyMetrics
from loomserve.platform.access.shared_counts import Count, Counts, OnlyOne, of_key
from loomserve.platform.access.shared_limits import check_tokens_elsewhere, day_limit, tokens_limit
from loomserve.platform.access.token_limits import (
    TokenUsage,
    charge_tokens,
    check_tokens,
    day_of,
    is_limited,
    tokens_left,
)
from loomserve.platform.base.clock import steady_unix_clock
from loomserve.platform.base.files import replace_private
from loomserve.platform.base.paths import cache_folder
from loomserve.platform.config import ApiKey, Server

_log = logging.getLogger("ray.serve")

SAVE_S = 5.0
"""A gateway that dies forgets so much of what it charged last."""


def usage_path(server: Server) -> Path:
    """The file of the day's tokens of one platform: they differ in their ports."""
    return cache_folder() / f"tokens-{server.port}.json"


class TokenMeter:
    """Tokens that each API key has used in all front ends; used on the event loop only.

    The day's tokens outlive them in a file, which each front end keeps.
    """

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
            metrics: told of each charge.
            file: what the day's tokens are read from, and kept in.
            counts: what other front ends of the node charge; None: there is no other.
            allowances: what other nodes leave; None: there is no other.
            clock: seconds, for the minute's limits.
            unix_clock: Unix seconds, for the day's; None: one that takes no steps.
        """
        self._metrics = metrics
        self._file = file
        self._counts = counts or OnlyOne()
        self._allowances = allowances
        self._shared = counts is not None
        self._clock = clock
        self._unix_clock = unix_clock or steady_unix_clock()
        self._usage = _read_first(file)
        self._kept: dict[str, TokenUsage] = {}
        self._saved = self._text()
        self._unwritable = False

    def check(self, key: ApiKey) -> None:
        """Check that a key may use another token.

        Raises:
            TooManyRequests: it has none left.
        """
        if not is_limited(key):
            return
        usage, unix_s = self._of(key), self._unix_clock()
        check_tokens(key, usage, self._clock(), unix_s)
        if self._allowances is not None:
            check_tokens_elsewhere(self._allowances, key, usage, unix_s)

    def charge(self, key: ApiKey, prompt: int, completion: int) -> None:
        """Count the tokens of a request that ended."""
        if not (prompt or completion):
            return
        self._metrics.used(key.name, prompt, completion)
        tokens = prompt + completion
        self._counts.add(of_key(key.name), Count.TOKENS, tokens)
        limit = tokens_limit(key)
        if self._allowances is not None and limit is not None:
            self._allowances.use(limit, tokens)
        self._charge(key, self._of(key), tokens)

    def look(self, keys: Iterable[ApiKey]) -> None:
        """Take over what other front ends have charged; to be called every ``LOOK_S``."""
        for key in keys:
            self._of(key)
        kept, self._kept = self._kept, {}
        for name, usage in kept.items():
            own = self._usage.get(name, TokenUsage())
            if (usage.day, usage.of_day) > (own.day, own.of_day):
                self._usage[name] = replace(own, day=usage.day, of_day=usage.of_day)

    def headers(self, key: ApiKey) -> list[tuple[bytes, bytes]]:
        """OpenAI's headers of the minute's limit; none without one."""
        rate = key.tokens_per_minute
        if rate is None:
            return []
        left, full_in_s = tokens_left(rate, self._of(key), self._clock())
        limit = tokens_limit(key)
        if self._allowances is not None and limit is not None:
            left = min(left, max(0, int(self._allowances.room(limit))))
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

    def _of(self, key: ApiKey) -> TokenUsage:
        usage = self._usage.get(key.name, TokenUsage())
        news = self._counts.news(of_key(key.name), Count.TOKENS)
        return self._charge(key, usage, news) if news else usage

    def _charge(self, key: ApiKey, usage: TokenUsage, tokens: int) -> TokenUsage:
        unix_s = self._unix_clock()
        charged = charge_tokens(key, usage, tokens, self._clock(), unix_s)
        self._usage[key.name] = charged
        limit = day_limit(key, day_of(unix_s))
        if self._allowances is not None and limit is not None:
            # Of a node, whoever of its front ends has used them.
            self._allowances.use(limit, tokens, used=charged.of_day - tokens)
        return charged

    def _text(self) -> str:
        day = day_of(self._unix_clock())
        known = [*self._kept.items(), *self._usage.items()]
        tokens: dict[str, int] = {}
        for name, usage in known:
            if usage.day == day:
                tokens[name] = max(usage.of_day, tokens.get(name, 0))
        return json.dumps({"day": day, "tokens": tokens})


def _read_first(file: Path) -> dict[str, TokenUsage]:
    try:
        return _read(file)
    except OSError as error:
        _log.error("the day's tokens in %s are not read, and start at none: %r", file, error)
    return {}


def _read(file: Path) -> dict[str, TokenUsage]:
    """
    Raises:
        OSError: the file cannot be read; what it says is not lost by that.
    """
    try:
        kept = json.loads(file.read_text())
        day = int(kept["day"])
        return {
            str(name): TokenUsage(day=day, of_day=int(tokens))
            for name, tokens in kept["tokens"].items()
        }
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _log.error("the day's tokens in %s are not read, and start at none: %r", file, error)
    return {}
