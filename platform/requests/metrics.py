"""The gateway's metrics of the requests that pass through it.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loomserve.platform.adapters.metrics import AdapterMetrics

# Clients choose the names they ask for, so a name becomes a label only if it is a served model's.
UNKNOWN_MODEL = "unknown"

# vLLM's own buckets (vllm/v1/metrics/loggers.py), so that what a client saw at the gateway and
# what the engine measured can be laid over each other.
_FIRST_TOKEN_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_OUTPUT_TOKEN_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_BUCKETS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60,
    120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_DEADLINE_BUCKETS = (0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class GatewayMetrics:
    """The metrics of one gateway process; not thread-safe.

    Labels are looked up once and kept. Models that :meth:`set_models` did not name count as
    ``unknown``.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rejected = Counter(
            "loomserve_rejected_requests",
            "Errors that the platform itself answered, by their code.",
            ["reason"],
            registry=registry,
        )
        self._route_decisions = Counter(
            "loomserve_route_decisions",
            "Replicas chosen, by the policy and its reason.",
            ["model", "policy", "reason"],
            registry=registry,
        )
        self._alias_requests = Counter(
            "loomserve_alias_requests",
            "Requests for an alias, by the model that each was given.",
            ["alias", "model"],
            registry=registry,
        )
        self.adapters = AdapterMetrics(registry)
        self._counted_decisions: dict[tuple[str, str, str], int] = {}
        self._families = _ModelFamilies(registry)
        self._unknown = _ModelMetrics(self._families, UNKNOWN_MODEL)
        self._models: dict[str, _ModelMetrics] = {}

    def set_models(self, replicas: Mapping[str, Iterable[str]]) -> None:
        """Set the served models with the ids of their replicas; those that are gone lose their
        gauge of requests in flight, and counters stay."""
        for name in self._models.keys() - replicas.keys():
            self._models.pop(name).set_replicas(())
        for name, ids in replicas.items():
            if name not in self._models:
                self._models[name] = _ModelMetrics(self._families, name)
            self._models[name].set_replicas(ids)

    def set_decisions(self, decisions: Mapping[tuple[str, str, str], int]) -> None:
        """Set the routing decisions since the process started, by (model, policy, reason)."""
        for labels, count in decisions.items():
            new = count - self._counted_decisions.get(labels, 0)
            self._route_decisions.labels(*labels).inc(new)
        self._counted_decisions.update(decisions)

    def rejected(self, reason: str) -> None:
        """Count an error that the platform answered; ``reason`` is the error's ``code``."""
        self._rejected.labels(reason).inc()

    def alias_chosen(self, alias: str, model: str) -> None:
        self._alias_requests.labels(alias, model).inc()

    def finished(
        self, model: str, endpoint: str, status: int, duration_s: float, slo_ms: float | None
    ) -> None:
        """Count a request that ended, ``duration_s`` after it came.

        ``endpoint`` is the path of the gateway's route, which clients cannot choose freely. The
        deadline ``slo_ms`` is met by a success within that time.
        """
        metrics = self._model(model)
        metrics.requests(endpoint, status).inc()
        metrics.duration.observe(duration_s)
        if slo_ms is not None:
            metrics.slo_deadline.observe(slo_ms / 1000)
            metrics.slo_met[status < 400 and duration_s * 1000 <= slo_ms].inc()

    def streamed(self, model: str, *, ttft_s: float, stream_s: float, chunks: int) -> None:
        """Record the times of a complete stream: ``ttft_s`` to the engine's first piece,
        ``stream_s`` from there to the last. A single chunk gives no time between tokens."""
        metrics = self._model(model)
        metrics.time_to_first_token.observe(ttft_s)
        if chunks > 1:
            metrics.time_per_output_token.observe(stream_s / (chunks - 1))

    def in_flight(self, model: str, replica: str) -> AbstractContextManager[None]:
        """Count a request on a replica for as long as the ``with`` block runs."""
        return self._model(model).in_flight(replica).track_inprogress()

    def queued(self, model: str) -> AbstractContextManager[None]:
        """Count a request as waiting for a replica for as long as the ``with`` block runs."""
        return self._model(model).queue.track_inprogress()

    def client_disconnected(self, model: str) -> None:
        self._model(model).client_disconnects.inc()

    def length_predicted(self, model: str, outcome: str) -> None:
        """Count a prediction by outcome: ``made``, too ``late``, ``failed``, or ``untrained``."""
        self._model(model).length_predictions[outcome].inc()

    def length_observed(self, model: str, error_tokens: float) -> None:
        """Count an answer that ended by itself, ``error_tokens`` off its predicted length."""
        metrics = self._model(model)
        metrics.length_observed.inc()
        metrics.length_error.inc(error_tokens)

    def refused_late(self, model: str) -> None:
        self._model(model).refused_late.inc()

    def _model(self, name: str) -> _ModelMetrics:
        return self._models.get(name, self._unknown)


class _ModelFamilies:
    """The metrics that have a value for each model, which is their first label."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, ["model", *labels], registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, ["model", *labels], registry=registry)

        def histogram(name: str, about: str, buckets: Sequence[float]) -> Histogram:
            return Histogram(name, about, ["model"], buckets=buckets, registry=registry)

        self.requests = counter(
            "loomserve_requests", "Requests answered, by HTTP status.", "endpoint", "status"
        )
        self.duration = histogram(
            "loomserve_request_duration_seconds",
            "From a request's arrival to the last byte of its answer.",
            _REQUEST_BUCKETS,
        )
        self.time_to_first_token = histogram(
            "loomserve_time_to_first_token_seconds",
            "From a streaming request's way to its engine to the first piece that an engine gave.",
            _FIRST_TOKEN_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "loomserve_time_per_output_token_seconds",
            "Mean time between the chunks of one streamed answer.",
            _OUTPUT_TOKEN_BUCKETS,
        )
        self.in_flight = gauge(
            "loomserve_requests_in_flight",
            "Requests that the gateway has open on a replica.",
            "replica",
        )
        self.queue = gauge(
            "loomserve_gateway_queue", "Requests that wait in the gateway for a replica."
        )
        self.client_disconnects = counter(
            "loomserve_client_disconnects", "Clients that left before their answer was complete."
        )
        self.slo_deadline = histogram(
            "loomserve_slo_deadline_seconds",
            "Deadlines (x-slo-ms) of the requests that were accepted with one.",
            _DEADLINE_BUCKETS,
        )
        self.slo_met = counter(
            "loomserve_slo_met", "Requests with a deadline, by whether it was met.", "met"
        )
        self.refused_late = counter(
            "loomserve_refused_late",
            "Requests refused because they were predicted to miss their deadline.",
        )
        self.length_predictions = counter(
            "loomserve_length_predictions",
            "Lengths of answers that were asked for, by what came of it.",
            "outcome",
        )
        self.length_observed = counter(
            "loomserve_length_observed", "Predicted answers that ended by themselves."
        )
        self.length_error = counter(
            "loomserve_length_error_tokens",
            "Sum over those of the predicted length's absolute error.",
        )


class _ModelMetrics:
    """The metrics of one model: each family's children with its label."""

    def __init__(self, families: _ModelFamilies, model: str) -> None:
        self._families = families
        self._model = model
        self._requests: dict[tuple[str, int], Counter] = {}
        self._in_flight: dict[str, Gauge] = {}
        self.duration = families.duration.labels(model)
        self.time_to_first_token = families.time_to_first_token.labels(model)
        self.time_per_output_token = families.time_per_output_token.labels(model)
        self.queue = families.queue.labels(model)
        self.client_disconnects = families.client_disconnects.labels(model)
        self.slo_deadline = families.slo_deadline.labels(model)
        self.slo_met = {
            True: families.slo_met.labels(model, "true"),
            False: families.slo_met.labels(model, "false"),
        }
        self.length_predictions = {
            outcome: families.length_predictions.labels(model, outcome)
            for outcome in ("made", "late", "failed", "untrained")
        }
        self.length_observed = families.length_observed.labels(model)
        self.length_error = families.length_error.labels(model)
        self.refused_late = families.refused_late.labels(model)

    def requests(self, endpoint: str, status: int) -> Counter:
        counter = self._requests.get((endpoint, status))
        if counter is None:
            counter = self._families.requests.labels(self._model, endpoint, status)
            self._requests[endpoint, status] = counter
        return counter

    def in_flight(self, replica: str) -> Gauge:
        gauge = self._in_flight.get(replica)
        if gauge is None:
            gauge = self._families.in_flight.labels(self._model, replica)
            self._in_flight[replica] = gauge
        return gauge

    def set_replicas(self, replicas: Iterable[str]) -> None:
        replicas = set(replicas)
        for replica in self._in_flight.keys() - replicas:
            del self._in_flight[replica]
            self._families.in_flight.remove(self._model, replica)
        for replica in replicas:
            self.in_flight(replica)
