"""Scheduling in the engines: who waits, who is preempted, and whether that was predicted."""

from __future__ import annotations

from dashboards.panels import MODEL, Choice, Dashboard, Panel, Query, number, ratio, total

_NEVER = '{model=~"$model", le="0.0"}'

DASHBOARD = Dashboard(
    "scheduling",
    "scheduling in the engines",
    (
        number(
            "How many requests wait?",
            "In all engines' queues. Above zero for long: the replicas are saturated.",
            f"sum(vllm:num_requests_waiting{MODEL})",
        ),
        number(
            "How long has the oldest waited?",
            "Rising steadily: requests come faster than they are served; add replicas.",
            f"max(loomserve_oldest_waiting_seconds{MODEL})",
            "s",
        ),
        number(
            "How many preemptions are there a second?",
            "Steady growth: raise kv_cache_memory.",
            total("loomserve_preemptions_total", where=MODEL),
            "ops",
        ),
        number(
            "Which share of steps goes into scheduling?",
            "More than a hundredth: thousands of requests wait in the engine.",
            ratio(
                total("loomserve_scheduling_seconds_total", where=MODEL),
                total("loomserve_step_seconds_total", where=MODEL),
            ),
            "percentunit",
        ),
        Panel(
            "How much longer do requests take because they wait?",
            "Their time in the engine over their time since they were first scheduled; 1: nobody "
            "waits to start. Rising in the 95th percentile only: short requests wait behind long "
            "ones, so choose another queue policy.",
            tuple(
                Query(
                    f"histogram_quantile({share}, "
                    f"{total('loomserve_weighted_turnaround_bucket', 'model, le', MODEL)})",
                    f"{{{{model}}}} {name}",
                )
                for share, name in ((0.5, "median"), (0.95, "95 %"))
            ),
            least=1,
        ),
        Panel(
            "Which replica lets a request wait the longest?",
            "Age of the oldest request that waits to start, or to go on after a preemption. Rising "
            "while the turnaround stays low: single requests starve.",
            (
                Query(
                    f"max by (model, replica) (loomserve_oldest_waiting_seconds{MODEL})",
                    "{{model}} {{replica}}",
                ),
            ),
            "s",
        ),
        Panel(
            "What becomes of preempted requests' KV?",
            "Kept in swap space, or computed again. recompute growing under adaptive: swap space "
            "is full (scheduling.swap_space), or copies are slower than computing.",
            (
                Query(
                    total("loomserve_preemptions_total", "model, mode", MODEL),
                    "{{model}} {{mode}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Which share of requests is preempted?",
            "At least once, of those that have ended. More than some hundredths: raise "
            "kv_cache_memory or lower max_num_seqs.",
            (
                Query(
                    "1 - "
                    + ratio(
                        total("loomserve_request_preemptions_bucket", "model", _NEVER),
                        total("loomserve_request_preemptions_count", "model", MODEL),
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How full is swap space?",
            "Near the capacity: raise scheduling.swap_space.",
            (
                Query(
                    f"sum by (model, replica) (loomserve_swap_used_bytes{MODEL})",
                    "{{model}} {{replica}} used",
                ),
                Query(
                    f"sum by (model, replica) (loomserve_swap_capacity_bytes{MODEL})",
                    "{{model}} {{replica}} capacity",
                ),
            ),
            "bytes",
        ),
        Panel(
            "Is the cost of computing known?",
            "Predicted over real time of steps; 1: it is. Far from it: run loomserve profile for "
            "the model.",
            (
                Query(
                    ratio(
                        total("loomserve_step_predicted_seconds_total", "model", MODEL),
                        total("loomserve_step_seconds_total", "model", MODEL),
                    ),
                    "{{model}}",
                ),
            ),
        ),
        Panel(
            "How much time do copies to and from swap space take?",
            "Real and as predicted, a second. A large share: raise kv_cache_memory.",
            (
                Query(
                    total("loomserve_swap_seconds_total", "model, direction", MODEL),
                    "{{model}} {{direction}}",
                ),
                Query(
                    total("loomserve_swap_predicted_seconds_total", "model, direction", MODEL),
                    "{{model}} {{direction}} predicted",
                ),
            ),
        ),
        Panel(
            "Is the cost of swapping known?",
            "Predicted over real time of copies; 1: it is. Far from it: something else uses the "
            "memory's bandwidth.",
            (
                Query(
                    ratio(
                        total("loomserve_swap_predicted_seconds_total", "model, direction", MODEL),
                        total("loomserve_swap_seconds_total", "model, direction", MODEL),
                    ),
                    "{{model}} {{direction}}",
                ),
            ),
        ),
    ),
    Choice("model", "loomserve_weighted_turnaround_count"),
)
