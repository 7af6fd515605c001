"""One model, or some: where the time of its requests goes, and what is done with its replicas."""

from __future__ import annotations

from dashboards.panels import MODEL, Choice, Dashboard, Panel, Query, mean, ratio, total

_MET = '{model=~"$model", met="true"}'

DASHBOARD = Dashboard(
    "model",
    "models",
    (
        Panel(
            "What makes up the time to the first token?",
            "Means. Most of it in the queue: add replicas. Most of it in the prompt: prompts are "
            "long and no cache has them. The whole far above the two: it passes outside the "
            "engine, as while a model is not ready.",
            (
                Query(
                    mean("loomserve_time_to_first_token_seconds", "model", MODEL),
                    "{{model}} as clients see it",
                ),
                Query(
                    mean("vllm:request_queue_time_seconds", "model", MODEL),
                    "{{model}} in the engine's queue",
                ),
                Query(
                    mean("vllm:request_prefill_time_seconds", "model", MODEL),
                    "{{model}} computing the prompt",
                ),
            ),
            "s",
        ),
        Panel(
            "How many tokens come in and go out?",
            "The load that prompts bring, and the throughput. In grows and out does not: prompts "
            "take the engines' time; roles or a KV store may help.",
            (
                Query(total("vllm:prompt_tokens_total", "model", MODEL), "{{model}} prompts"),
                Query(total("vllm:generation_tokens_total", "model", MODEL), "{{model}} answers"),
            ),
        ),
        Panel(
            "Which share of prompts need not be computed?",
            "Low although prompts share a beginning: requests go to other replicas (try router: "
            "{policy: prefix_aware}), or the KV store is too small.",
            (
                Query(
                    ratio(
                        total("vllm:prefix_cache_hits_total", "model", MODEL),
                        total("vllm:prefix_cache_queries_total", "model", MODEL),
                    ),
                    "{{model}} in the engine's cache",
                ),
                Query(
                    ratio(
                        total("loomserve_kv_hit_blocks_total", "model", MODEL),
                        f"({total('loomserve_kv_hit_blocks_total', 'model', MODEL)} + "
                        f"{total('loomserve_kv_missed_blocks_total', 'model', MODEL)})",
                    ),
                    "{{model}} of the rest, in the KV store",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How often are requests preempted?",
            "Any steady growth wastes work: raise kv_cache_memory or lower max_num_seqs.",
            (Query(total("vllm:num_preemptions_total", "model", MODEL), "{{model}}"),),
            "ops",
        ),
        Panel(
            "How do answers end?",
            "Many of length: answers are cut by max_tokens. abort: clients left.",
            (
                Query(
                    total("vllm:request_success_total", "model, finished_reason", MODEL),
                    "{{model}} {{finished_reason}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "How many clients leave before the end?",
            "Growing with the time to the first token: they give up waiting.",
            (Query(total("loomserve_client_disconnects_total", "model", MODEL), "{{model}}"),),
            "reqps",
        ),
        Panel(
            "How are requests spread over replicas?",
            "Uneven: see why replicas are chosen, beside this; one of them may be slow or drain.",
            (
                Query(
                    f"sum by (model, replica) (loomserve_requests_in_flight{MODEL})",
                    "{{model}} {{replica}}",
                ),
            ),
        ),
        Panel(
            "Why are replicas chosen?",
            "A reason that stands for missing or stale loads, growing: engines report late, so "
            "their cores are overloaded or their replicas hang.",
            (
                Query(
                    total("loomserve_route_decisions_total", "model, reason", MODEL),
                    "{{model}} {{reason}}",
                ),
            ),
            "ops",
        ),
        Panel(
            "Which share of deadlines is met?",
            "Of requests with x-slo-ms. Falling: more is accepted than the replicas can do; add "
            "replicas or lower max_concurrent_requests.",
            (
                Query(
                    ratio(
                        total("loomserve_slo_met_total", "model", _MET),
                        total("loomserve_slo_met_total", "model", MODEL),
                    ),
                    "{{model}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How long do requests wait for a model that is not ready?",
            "Means, by how the wait ended. refused: there is no room, raise devices[].memory or "
            "pin fewer models. too_late: it loads for longer than elastic.wait_timeout_s.",
            (
                Query(
                    mean("loomserve_model_wait_seconds", "model, outcome", MODEL),
                    "{{model}} {{outcome}}",
                ),
            ),
            "s",
        ),
        Panel(
            "How many replicas does its load ask for?",
            "Wanted at max for long: raise it, or add devices. The load above the number wanted "
            "for longer than a start: see loomserve_scaling_decisions_total.",
            (
                Query(f"max by (model) (loomserve_scaling_replicas{MODEL})", "{{model}} wanted"),
                Query(f"max by (model) (loomserve_scaling_load{MODEL})", "{{model}} load"),
            ),
        ),
        Panel(
            "Which models stand in for aliases?",
            "Shares that are not those of the weights: a model is not ready, and others stand in.",
            (
                Query(
                    total("loomserve_alias_requests_total", "alias, model", MODEL),
                    "{{alias}} by {{model}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Which adapters are asked for?",
            "By HTTP status. 503: no replica has the adapter, see "
            "GET /admin/v1/models/NAME/adapters.",
            (
                Query(
                    total("loomserve_adapter_requests_total", "model, adapter, status", MODEL),
                    "{{model}} {{adapter}} {{status}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "How far off are predicted lengths?",
            "Mean error in tokens, of models with lengths. Rising for long: train anew with "
            "loomserve lengths train.",
            (
                Query(
                    ratio(
                        total("loomserve_length_error_tokens_total", "model", MODEL),
                        total("loomserve_length_observed_total", "model", MODEL),
                    ),
                    "{{model}}",
                ),
            ),
        ),
    ),
    Choice("model", "loomserve_request_duration_seconds_count"),
)
