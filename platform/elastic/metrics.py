"""A gateway's metrics of models' states, and of the requests that wait for them."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, Histogram

from loomserve.platform.state import ModelStatus

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)


class WaitingMetrics:
    """Described for operators in ``docs/metrics.md``."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._state = Gauge(
            "loomserve_model_state",
            "1 for the state that a model is in, 0 for all others.",
            ["model", "state"],
            registry=registry,
        )
        self._waited = Histogram(
            "loomserve_model_wait_seconds",
            "Time that requests waited for a model that was not ready, by how that ended.",
            ["model", "outcome"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._known: dict[str, ModelStatus] = {}

    def set_states(self, states: Mapping[str, ModelStatus]) -> None:
        for name in self._known.keys() - states.keys():
            for state in ModelStatus:
                self._state.remove(name, state)
        for name, status in states.items():
            if self._known.get(name) is not status:
                for state in ModelStatus:
                    self._state.labels(name, state).set(state is status)
        self._known = dict(states)

    def waited(self, model: str, outcome: str, seconds: float) -> None:
        self._waited.labels(model, outcome).observe(seconds)
