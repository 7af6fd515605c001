"""The devices: what is asked of each, what is on it, and what it does for others."""

from __future__ import annotations

from dashboards.panels import DEVICE, Choice, Dashboard, Panel, Query, total

_COMPUTE = '{device=~"$device", of="compute"}'
_MEMORY = '{device=~"$device", of="memory"}'

DASHBOARD = Dashboard(
    "devices",
    "devices",
    (
        Panel(
            "How much compute is each device asked for?",
            "Device seconds a second. Above 1: more is asked than it can do. Far apart between "
            "devices: see what plans propose (loomserve admin plans make).",
            (
                Query(
                    f"max by (device) (loomserve_rebalancing_utilisation{_COMPUTE})", "{{device}}"
                ),
            ),
        ),
        Panel(
            "How much of its memory is in use?",
            "KV memory that nobody uses counts as free. Near 1: pin fewer models, or add devices.",
            (Query(f"max by (device) (loomserve_rebalancing_utilisation{_MEMORY})", "{{device}}"),),
            "percentunit",
        ),
        Panel(
            "Which share of the time do its engines compute?",
            "By model; the rest of a second the engine is idle. All of them together near 1: the "
            "device is full, whatever the queues say.",
            (
                Query(
                    total("loomserve_step_seconds_total", "device, model", DEVICE),
                    "{{device}} {{model}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Which engines are on it, with how many requests?",
            "A line for each replica. None for a model that should be there: loomserve status.",
            (
                Query(
                    f"sum by (device, model, replica) (vllm:num_requests_running{DEVICE})",
                    "{{device}} {{model}} {{replica}}",
                ),
            ),
        ),
        Panel(
            "How many tokens does it generate?",
            "Falls while requests wait there: prompts take its time, or something else runs on it.",
            (Query(total("vllm:generation_tokens_total", "device", DEVICE), "{{device}}"),),
        ),
        Panel(
            "How much of its memory do its engines have?",
            "What their processes have for themselves, or what they have of the GPU; of a pipeline "
            "all of it. Steady growth: note the model and restart its replica.",
            (
                Query(
                    f"sum by (device, model) (loomserve_engine_memory_bytes{DEVICE})",
                    "{{device}} {{model}}",
                ),
            ),
            "bytes",
        ),
        Panel(
            "How much of its time does it compute for other engines?",
            "Attention that it lends. A large share: its own requests feel it, see their time "
            "between tokens.",
            (
                Query(
                    total("loomserve_lending_service_seconds_total", "device, borrower", DEVICE),
                    "{{device}} for {{borrower}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How much of its time does it wait for lenders?",
            "A growing share: too many requests lie there, or the lender is busy.",
            (
                Query(
                    total("loomserve_lending_wait_seconds_total", "device, lender", DEVICE),
                    "{{device}} for {{lender}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Where are prompts of decode replicas computed?",
            "prefill_away growing: no replica has the role of prefill, or it was killed. Mostly "
            "local: prompts are short, so prefill replicas are of little use.",
            (
                Query(
                    total("loomserve_handoffs_total", "device, outcome", DEVICE),
                    "{{device}} {{outcome}}",
                ),
            ),
            "ops",
        ),
    ),
    Choice("device", "vllm:num_requests_running"),
)
