"""API keys: who uses what, who is at a limit, and who takes the devices' time."""

from __future__ import annotations

from dashboards.panels import KEY, Choice, Dashboard, Panel, Query, ratio, total

_BOTH = '{key=~"$key", kind="prompt"}'
_ANSWERS = '{key=~"$key", kind="completion"}'
_LIMITS = '{reason=~"rate_limit_exceeded|token_limit_exceeded|concurrency_limit_exceeded"}'

DASHBOARD = Dashboard(
    "tenants",
    "API keys",
    (
        Panel(
            "Who takes the devices' time?",
            "Device seconds a second, by key. One key near the number of devices: give it limits, "
            "or have it send batches.",
            (Query(total("loomserve_usage_device_seconds_total", "key", KEY), "{{key}}"),),
        ),
        Panel(
            "Which models do they use for it?",
            "The same by model: what to charge, and whose traffic a model's page shows.",
            (
                Query(
                    total("loomserve_usage_device_seconds_total", "key, model", KEY),
                    "{{key}} {{model}}",
                ),
            ),
        ),
        Panel(
            "How many requests does each send?",
            "Requests for which engines gave at least one token. A key far above its usual: ask "
            "its user.",
            (Query(total("loomserve_usage_requests_total", "key", KEY), "{{key}}"),),
            "reqps",
        ),
        Panel(
            "How many tokens does each use?",
            "As engines count them. GET /admin/v1/usage has the sums of months.",
            (
                Query(total("loomserve_usage_tokens_total", "key", _BOTH), "{{key}} prompts"),
                Query(total("loomserve_usage_tokens_total", "key", _ANSWERS), "{{key}} answers"),
            ),
        ),
        Panel(
            "Which share of a key's prompts does a cache have?",
            "Low although its prompts begin alike: they differ in their first tokens, as by a "
            "date.",
            (
                Query(
                    ratio(
                        total("loomserve_usage_cached_tokens_total", "key", KEY),
                        total("loomserve_usage_tokens_total", "key", _BOTH),
                    ),
                    "{{key}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How many tokens are charged to limits?",
            "What tokens_per_minute and tokens_per_day of a key are compared with; of keys without "
            "a limit only what answers told.",
            (
                Query(
                    total("loomserve_key_tokens_total", "key, kind", KEY),
                    "{{key}} {{kind}}",
                ),
            ),
        ),
        Panel(
            "How many requests are over a limit of a key?",
            "Of all keys; the gateway's answers name the key. Many: raise its limits, or add "
            "replicas.",
            (Query(total("loomserve_rejected_requests_total", "reason", _LIMITS), "{{reason}}"),),
            "reqps",
        ),
        Panel(
            "Is the newest keys file in use?",
            "0: it is wrong, and the keys before it hold; loomserve key list CONFIG says what is "
            "wrong.",
            (Query("min(loomserve_keys_file_up)", "in use"),),
        ),
    ),
    Choice("key", "loomserve_usage_requests_total"),
)
