"""The gateway's metrics of API keys; their labels are names of the configuration alone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class KeyMetrics:
    """Metrics by API key."""

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
        """Count the tokens of a request that ended."""
        self._tokens.labels(key, "prompt").inc(prompt)
        self._tokens.labels(key, "completion").inc(completion)

    def set_file(self, *, up: bool) -> None:
        self._file_up.set(up)
