"""Batches: what is left, how fast it goes, and whether it will be in time."""

from __future__ import annotations

from dashboards.panels import Dashboard, Panel, Query, number, total

DASHBOARD = Dashboard(
    "batch",
    "batches",
    (
        number(
            "How many lines are open?",
            "Lines without an answer. Grows over days: more is sent than engines have time for.",
            "sum(loomserve_batch_open_lines)",
        ),
        number(
            "When is the last open batch done?",
            "At the pace of the last two minutes; 0 while nothing tells. Rises with no new "
            "batches: online requests take more of the engines.",
            "max(loomserve_batch_eta_seconds)",
            "s",
        ),
        number(
            "How many batches will be late?",
            "Above zero: add replicas, or tell clients.",
            "max(loomserve_batch_late)",
        ),
        number(
            "Does the batch lane answer?",
            "0 for longer than some seconds: Serve could not start it again; see its log. Online "
            "requests go on without it.",
            "min(loomserve_batch_up)",
        ),
        Panel(
            "Where are open lines?",
            "engine at zero while queue is not: online requests need everything, or no replica is "
            "ready; see loomserve status.",
            (Query("sum by (at) (loomserve_batch_open_lines)", "{{at}}"),),
        ),
        Panel(
            "How fast are lines answered?",
            "failed growing: read the batches' error files.",
            (Query(total("loomserve_batch_lines_total", "outcome"), "{{outcome}}"),),
            "ops",
        ),
        Panel(
            "What became of batches?",
            "failed: clients send wrong files. expired: more is asked than fits into the windows.",
            (Query("sum by (status) (loomserve_batch_batches)", "{{status}}"),),
        ),
        Panel(
            "How often do engines fail on lines?",
            "Together with requests that had to go on elsewhere (gone): engines crash, perhaps "
            "because of a line.",
            (Query(total("loomserve_batch_retries_total"), "tried again"),),
            "ops",
        ),
        Panel(
            "Are the processes of offline models there?",
            "0 for long: loomserve batch list says why.",
            (Query("min by (model) (loomserve_batch_offline_up)", "{{model}}"),),
        ),
        Panel(
            "Do static batches fit into memory?",
            "out_of_memory above a tenth: answers are longer than predicted; give the model "
            "lengths, or more kv_cache_memory.",
            (
                Query(
                    total("loomserve_batch_offline_batches_total", "model, outcome"),
                    "{{model}} {{outcome}}",
                ),
            ),
            "ops",
        ),
    ),
)
