"""The gateway's metrics of the requests that pass through it.

Every metric is described for operators in ``docs/metrics.md``; a test keeps the two alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from loomserve.platform.adapters.metrics import AdapterMetrics

# Clients choose the names they ask for, so a name becomes a label only if it is a served model's.
UNKNOWN_MODEL = "unknown"
_MET = {True: "true", False: "false"}

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
    """The metrics of one gateway process; not thread-safe. Models that :meth:`set_models` did not
    name count as ``unknown``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(name, about, labels, registry=registry)

        def gauge(name: str, about: str, *labels: str) -> Gauge:
            return Gauge(name, about, labels, registry=registry)

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, about, ["model"], buckets=buckets, registry=registry)

        self._rejected = counter(
            "loomserve_rejected_requests",
            "Errors that the platform itself answered, by their code.",
            "reason",
        )
        self._route_decisions = counter(
            "loomserve_route_decisions",
            "Replicas chosen, by the policy and its reason.",
            *("model", "policy", "reason"),
        )
        self._alias_requests = counter(
            "loomserve_alias_requests",
            "Requests for an alias, by the model that each was given.",
            *("alias", "model"),
        )
        self.adapters = AdapterMetrics(registry)
        self._requests = counter(
            "loomserve_requests",
            "Requests answered, by HTTP status.",
            *("model", "endpoint", "status"),
        )
        self._duration = histogram(
            "loomserve_request_duration_seconds",
            "From a request's arrival to the last byte of its answer.",
            _REQUEST_BUCKETS,
        )
        self._time_to_first_token = histogram(
            "loomserve_time_to_first_token_seconds",
            "From a streaming request's way to its engine to the first piece that an engine gave.",
            _FIRST_TOKEN_BUCKETS,
        )
        self._time_per_output_token = histogram(
            "loomserve_time_per_output_token_seconds",
            "Mean time between the chunks of one streamed answer.",
            _OUTPUT_TOKEN_BUCKETS,
        )
        self._in_flight = gauge(
            "loomserve_requests_in_flight",
            "Requests that the gateway has open on a replica.",
            *("model", "replica"),
        )
        self._queue = gauge(
            "loomserve_gateway_queue", "Requests that wait in the gateway for a replica.", "model"
        )
        self._client_disconnects = counter(
            "loomserve_client_disconnects",
            "Clients that left before their answer was complete.",
            "model",
        )
        self._slo_deadline = histogram(
            "loomserve_slo_deadline_seconds",
            "Deadlines (x-slo-ms) of the requests that were accepted with one.",
            _DEADLINE_BUCKETS,
        )
        self._slo_met = counter(
            "loomserve_slo_met",
            "Requests with a deadline, by whether it was met.",
            *("model", "met"),
        )
        self._refused_late = counter(
            "loomserve_refused_late",
            "Requests refused because they were predicted to miss their deadline.",
            "model",
        )
        self._length_predictions = counter(
            "loomserve_length_predictions",
            "Lengths of answers that were asked for, by what came of it.",
            *("model", "outcome"),
        )
        self._length_observed = counter(
            "loomserve_length_observed", "Predicted answers that ended by themselves.", "model"
        )
        self._length_error = counter(
            "loomserve_length_error_tokens",
            "Sum over those of the predicted length's absolute error.",
            "model",
        )
        self._counted_decisions: dict[tuple[str, str, str], int] = {}
        self._replicas: dict[str, set[str]] = {}
        self._open = defaultdict[str, defaultdict[str, int]](lambda: defaultdict(int))
        self._show(UNKNOWN_MODEL)

    def _show(self, model: str) -> None:
        """Have a model's metrics shown, as zeros."""
        for each in (
            *(self._duration, self._time_to_first_token, self._time_per_output_token),
            *(self._queue, self._client_disconnects, self._slo_deadline, self._refused_late),
            *(self._length_observed, self._length_error),
        ):
            each.labels(model)
        for met in _MET.values():
            self._slo_met.labels(model, met)
        for outcome in ("made", "late", "failed", "untrained"):
            self._length_predictions.labels(model, outcome)

    def set_models(self, replicas: Mapping[str, Iterable[str]]) -> None:
        """Set the served models with the ids of their replicas; those that are gone lose their
        gauge of requests in flight, and counters stay."""
        wanted = {model: set(ids) for model, ids in replicas.items()}
        for model in wanted.keys() - self._replicas.keys():
            self._show(model)
        for model in wanted.keys() | self._replicas.keys():
            there = wanted.get(model, set())
            for replica in self._replicas.get(model, set()) - there:
                self._in_flight.remove(model, replica)
                self._open[model].pop(replica, None)
            for replica in there:
                count = partial(self._open[model].__getitem__, replica)
                self._in_flight.labels(model, replica).set_function(count)
        self._replicas = wanted

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
        """Count a request that ended, ``duration_s`` after it came. ``endpoint`` is the path of the
        gateway's route, which clients cannot choose freely. The deadline ``slo_ms`` is met by a
        success within that time."""
        model = self._label(model)
        self._requests.labels(model, endpoint, status).inc()
        self._duration.labels(model).observe(duration_s)
        if slo_ms is not None:
            self._slo_deadline.labels(model).observe(slo_ms / 1000)
            met = _MET[status < 400 and duration_s * 1000 <= slo_ms]
            self._slo_met.labels(model, met).inc()

    def streamed(self, model: str, *, ttft_s: float, stream_s: float, chunks: int) -> None:
        """Record the times of a complete stream: ``ttft_s`` to the engine's first piece,
        ``stream_s`` from there to the last. A single chunk gives no time between tokens."""
        model = self._label(model)
        self._time_to_first_token.labels(model).observe(ttft_s)
        if chunks > 1:
            self._time_per_output_token.labels(model).observe(stream_s / (chunks - 1))

    def in_flight(self, model: str) -> dict[str, int]:
        """Requests of a model's replicas, by id, of which the gauge shows those that there are."""
        return self._open[model]

    def queued(self, model: str) -> AbstractContextManager[None]:
        """Count a request as waiting for a replica for as long as the ``with`` block runs."""
        return self._queue.labels(self._label(model)).track_inprogress()

    def client_disconnected(self, model: str) -> None:
        self._client_disconnects.labels(self._label(model)).inc()

    def length_predicted(self, model: str, outcome: str) -> None:
        """Count a prediction by outcome: ``made``, too ``late``, ``failed``, or ``untrained``."""
        self._length_predictions.labels(self._label(model), outcome).inc()

    def length_observed(self, model: str, error_tokens: float) -> None:
        """Count an answer that ended by itself, ``error_tokens`` off its predicted length."""
        self._length_observed.labels(self._label(model)).inc()
        self._length_error.labels(self._label(model)).inc(error_tokens)

    def refused_late(self, model: str) -> None:
        self._refused_late.labels(self._label(model)).inc()

    def _label(self, model: str) -> str:
        return model if model in self._replicas else UNKNOWN_MODEL
