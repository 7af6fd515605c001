"""A decode engine's metrics of the prompts that a prefill engine computed for it.

Like vLLM's own, they are in the default registry of the engine's process; the gateway adds
the labels ``model``, ``replica`` and ``device``.
"""

from __future__ import annotations

from prometheus_client import Counter, Histogram

HANDOFFS = Counter(
    "loomserve_handoffs",
    "Requests of a decode replica, by what a prefill replica did for them.",
    ["outcome"],
)
HANDOFF_SECONDS = Histogram(
    "loomserve_handoff_seconds",
    "From the prefill replica's answer to the decode replica's own first token.",
    buckets=(0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.4, 0.8, 2, 5),
)
HANDOFF_TOKENS = Counter(
    "loomserve_handoff_tokens",
    "Prompt tokens of handed over requests: from the store, or computed again.",
    ["source"],
)
