"""What one API key used of one model in one minute: a line of the files of a month."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec

MINUTE_S = 60


class UsageRecord(msgspec.Struct):
    """Sums over the requests that ended in a minute."""

    minute: str
    """When it began, as ``2026-11-26T01:30Z``."""
    key: str
    """The API key's name; empty: requests without a key."""
    model: str
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of those, the ones that the prefix cache or the KV store had."""
    completion_tokens: int = 0
    device_seconds: float = 0.0

    @property
    def month(self) -> str:
        """As ``2026-11``."""
        return self.minute[:7]

    def add(self, other: UsageRecord) -> None:
        """Add another record's sums."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens
        self.device_seconds += other.device_seconds


def minute_of(unix_s: float) -> str:
    """The minute of a time in Unix seconds; later ones are greater as text, too."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%dT%H:%MZ}"
