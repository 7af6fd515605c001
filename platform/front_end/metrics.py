"""What continuation of requests looks like to operators: ``docs/metrics.md`` has its words."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_PAUSE_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 4, 5, 7.5, 10, 20, 30, 60)


class ContinuationMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self._continued = Counter(
            "loomserve_continued_requests",
            "Requests that went on with another replica, or anew with theirs, by reason.",
            ["model", "reason"],
            registry=registry,
        )
        self._pauses = Histogram(
            "loomserve_continuation_pause_seconds",
            "From the last token before a request moved to the first after.",
            ["model"],
            buckets=_PAUSE_BUCKETS,
            registry=registry,
        )
        self._ended = Counter(
            "loomserve_uncontinued_requests",
            "Requests that ended because they could not go on, by reason.",
            ["model", "reason"],
            registry=registry,
        )

    def of(self, model: str) -> ModelContinuationMetrics:
        return ModelContinuationMetrics(model, self._continued, self._pauses, self._ended)


class ModelContinuationMetrics:
    def __init__(self, model: str, continued: Counter, pauses: Histogram, ended: Counter) -> None:
        self._model = model
        self._continued, self._pauses, self._ended = continued, pauses, ended

    def continued(self, reason: str) -> None:
        """A request was sent again; ``reason`` is a :class:`~.policy.continuation.Loss`."""
        self._continued.labels(self._model, reason).inc()

    def paused(self, seconds: float) -> None:
        self._pauses.labels(self._model).observe(seconds)

    def ended(self, reason: str) -> None:
        """A request was ended; ``reason`` is of :class:`~.policy.continuation.Action`."""
        self._ended.labels(self._model, reason).inc()
