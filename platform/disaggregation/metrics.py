"""A decode replica's metrics of the prompts that a prefill replica computed for it.

The gateway adds the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5)


class HandoffMetrics:
    """Those of one decode replica."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._handoffs = Counter(
            "loomserve_handoffs",
            "Requests of a decode replica, by what a prefill replica did for them.",
            ["outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            "loomserve_handoff_seconds",
            "From the prefill replica's answer to the decode replica's own first token.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._tokens = Counter(
            "loomserve_handoff_tokens",
            "Prompt tokens of handed over requests: from the store, or computed again.",
            ["source"],
            registry=registry,
        )

    def prompt(self, outcome: str) -> None:
        """A request's prompt has been computed, or is to be computed at the decode replica.
        ``outcome`` is a :class:`~.policy.prompts.PromptPlace`."""
        self._handoffs.labels(outcome).inc()

    def went_on(self, seconds: float) -> None:
        """The decode replica has its own first token so long after the prefill replica's."""
        self._seconds.observe(seconds)

    def prompt_tokens(self, stored: int, recomputed: int) -> None:
        """So many tokens of a prompt came from the store, and so many did not."""
        self._tokens.labels("store").inc(stored)
        self._tokens.labels("recomputed").inc(recomputed)
