"""The KV store: what it finds, how full it is, and what it loses."""

from __future__ import annotations

from dashboards.panels import MODEL, Choice, Dashboard, Panel, Query, ratio, total

_HITS = total("loomserve_kv_hit_blocks_total", "model", MODEL)
_MISSES = total("loomserve_kv_missed_blocks_total", "model", MODEL)

DASHBOARD = Dashboard(
    "kvstore",
    "KV store",
    (
        Panel(
            "Which share of looked up blocks is found?",
            "Falling while blocks are evicted: the store is too small for the prompts that come "
            "back. Falling alone: prompts are new.",
            (Query(ratio(_HITS, f"({_HITS} + {_MISSES})"), "{{model}}"),),
            "percentunit",
        ),
        Panel(
            "How many blocks are looked up?",
            "None although the model is asked: its kvstore is false, or its prompts are shorter "
            "than a block.",
            (Query(_HITS, "{{model}} found"), Query(_MISSES, "{{model}} missed")),
            "ops",
        ),
        Panel(
            "How full are its tiers?",
            "A full store is normal: it evicts. Look at what is found before making it larger.",
            (
                Query(
                    "sum by (tier) (loomserve_kv_used_bytes) "
                    "/ (sum by (tier) (loomserve_kv_capacity_bytes) > 0)",
                    "{{tier}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Which models have its blocks?",
            "One crowds out others: give it a kvstore_quota. None of a model that is asked: its "
            "blocks are larger than the store's pieces, so raise kvstore.memory.",
            (
                Query(
                    f"sum by (model, tier) (loomserve_kv_blocks{MODEL})",
                    "{{model}} {{tier}}",
                ),
            ),
        ),
        Panel(
            "How many blocks leave memory for others?",
            "Steady growth: raise kvstore.memory, or add kvstore.ssd to find them again.",
            (Query(total("loomserve_kv_evicted_blocks_total", "model", MODEL), "{{model}}"),),
            "ops",
        ),
        Panel(
            "Does it answer, and are blocks whole?",
            "The store at 0: it is started again, and requests go on without it. Any corrupt "
            "block: an engine died while it wrote, or memory or disk is failing.",
            (
                Query("min(loomserve_kv_up)", "answers"),
                Query("sum(increase(loomserve_kv_corrupt_blocks_total[1h]))", "corrupt in an hour"),
            ),
        ),
        Panel(
            "How much do nodes fetch from each other?",
            "What fetches take of the network. Only with several nodes, as the next ones.",
            (Query(total("loomserve_kv_fetched_bytes_total"), "fetched"),),
            "Bps",
        ),
        Panel(
            "Which fetches bring nothing?",
            "gone: a node was lost, or its store is overloaded. corrupt: memory or network is "
            "failing. refused: a model's blocks differ between nodes.",
            (Query(total("loomserve_kv_failed_fetches_total", "reason"), "{{reason}}"),),
            "ops",
        ),
        Panel(
            "How fast are the links between nodes?",
            "Far below the others': that link is slow or shared.",
            (Query("min by (peer) (loomserve_kv_link_bytes_per_second)", "from {{peer}}"),),
            "Bps",
        ),
        Panel(
            "Do all nodes know each other's stores?",
            "Fewer than there are other nodes: a store does not start; the controller's log says "
            "why.",
            (Query("min(loomserve_kv_peers)", "fewest that one knows"),),
        ),
    ),
    Choice("model", "loomserve_kv_hit_blocks_total"),
)
