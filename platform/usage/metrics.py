"""The gateway's metrics of usage; names of keys are the configuration's, of models those served."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from loomserve.platform.usage.records import UsageRecord


class UsageMetrics:
    """Metrics by API key and model."""

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
        """Count a request that ended."""
        labels = record.key, record.model
        self._requests.labels(*labels).inc(record.requests)
        self._tokens.labels(*labels, "prompt").inc(record.prompt_tokens)
        self._tokens.labels(*labels, "completion").inc(record.completion_tokens)
        self._cached.labels(*labels).inc(record.cached_tokens)
        self._device.labels(*labels).inc(record.device_seconds)
