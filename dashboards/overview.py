"""What an operator opens first: does it answer, how quickly, how full is it, what is broken."""

from __future__ import annotations

from dashboards.panels import Dashboard, Panel, Query, number, quantiles, ratio, total

_5XX = '{status=~"5.."}'

DASHBOARD = Dashboard(
    "overview",
    "overview",
    (
        number(
            "How many models are ready?",
            "Fewer than there should be: the panel of states below, and loomserve status.",
            'sum(max by (model) (loomserve_model_state{state="ready"}))',
        ),
        number(
            "How many requests come a second?",
            "None: look at what is refused, then whether clients reach the gateway at all.",
            total("loomserve_requests_total"),
            "reqps",
        ),
        number(
            "Which share fails because of us?",
            "Answers with a status of 5xx. Above a hundredth: see what engines did to requests, "
            "then the log under a request's id.",
            ratio(
                f"({total('loomserve_requests_total', where=_5XX)} or vector(0))",
                total("loomserve_requests_total"),
            ),
            "percentunit",
        ),
        number(
            "How many tokens are generated a second?",
            "The throughput of all engines. Falls while requests wait: see the devices.",
            total("vllm:generation_tokens_total"),
        ),
        number(
            "How many processes cannot be read?",
            "Engines, or the gateway's own parts, whose metrics are missing here: they hang or are "
            "gone, see loomserve status.",
            "count(loomserve_scrape_up == 0) or vector(0)",
        ),
        number(
            "How many alerts fire?",
            "Prometheus' page of alerts says which; each leads to docs/runbooks.md.",
            'count(ALERTS{alertname=~"Loomserve.+", alertstate="firing"}) or vector(0)',
        ),
        Panel(
            "How are requests answered?",
            "By HTTP status. 5xx is ours to fix; 429 is a limit, of a key or of a model; 499 are "
            "clients that left before there was an answer.",
            (Query(total("loomserve_requests_total", "status"), "{{status}}"),),
            "reqps",
        ),
        Panel(
            "What does the platform refuse?",
            "By the error's code, each of which docs/metrics.md explains at "
            "loomserve_rejected_requests_total.",
            (Query(total("loomserve_rejected_requests_total", "reason"), "{{reason}}"),),
            "reqps",
        ),
        Panel(
            "How long until the first token?",
            "As clients of streams see it, over all models. Rising together with waiting requests: "
            "too few replicas. Rising alone: longer prompts. The model's page splits it.",
            quantiles("loomserve_time_to_first_token_seconds", ""),
            "s",
        ),
        Panel(
            "How long between two tokens?",
            "Rising with the running requests: batches are large, so lower max_num_seqs or add "
            "replicas.",
            quantiles("loomserve_time_per_output_token_seconds", ""),
            "s",
        ),
        Panel(
            "How long do whole requests take?",
            "Depends on how much clients ask for: compare with the two above. Near "
            "server.request_timeout_s they are about to be ended.",
            quantiles("loomserve_request_duration_seconds", ""),
            "s",
        ),
        Panel(
            "How many requests run, and how many wait?",
            "Waiting in engines for long: the replicas are saturated. Waiting in the gateway: no "
            "replica takes requests, see loomserve status.",
            (
                Query("sum by (model) (vllm:num_requests_running)", "{{model}} running"),
                Query("sum by (model) (vllm:num_requests_waiting)", "{{model}} waiting"),
                Query("sum by (model) (loomserve_gateway_queue)", "{{model}} in the gateway"),
            ),
        ),
        Panel(
            "How full is the engines' KV memory?",
            "Of the fullest replica. Near 1, requests wait or are preempted: raise "
            "kv_cache_memory, lower max_num_seqs, or add replicas.",
            (Query("max by (model) (vllm:kv_cache_usage_perc)", "{{model}}"),),
            "percentunit",
        ),
        Panel(
            "Where are tokens generated?",
            "By device and model. A device at nothing while others are full: see what plans "
            "propose (loomserve admin plans make).",
            (
                Query(
                    total("vllm:generation_tokens_total", "device, model"),
                    "{{device}} {{model}}",
                ),
            ),
        ),
        Panel(
            "Which state are the models in?",
            "A line at 1 is the state that a model is in. failed: loomserve status says why. Often "
            "between ready and others: raise devices[].memory or elastic.residence_s.",
            (
                Query(
                    "max by (model, state) (loomserve_model_state) == 1",
                    "{{model}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Which part of the platform is away?",
            "1: it is there. Requests are served without any of these; the runbooks say what to "
            "look at.",
            (
                Query("min(loomserve_kv_up)", "KV store"),
                Query("min(loomserve_batch_up)", "batch lane"),
                Query("min(loomserve_rebalancing_up)", "controller"),
                Query("min(loomserve_keys_file_up)", "keys file"),
                Query("min(loomserve_scrape_up)", "metrics of all processes"),
            ),
        ),
        Panel(
            "Which requests had to go on elsewhere?",
            "By why they left their engine. gone: it crashed or was killed, most often for memory; "
            "silent: its cores are overloaded; drained, moved: operators' or the platform's doing.",
            (
                Query(
                    total("loomserve_continued_requests_total", "model, reason"),
                    "{{model}} {{reason}}",
                ),
            ),
            "reqps",
        ),
        Panel(
            "Which requests were lost?",
            "They could not go on elsewhere. no_replica: add replicas. suspect: the replicas' logs "
            "say how their engines ended.",
            (
                Query(
                    total("loomserve_uncontinued_requests_total", "model, reason"),
                    "{{model}} {{reason}}",
                ),
            ),
            "reqps",
        ),
    ),
)
