"""Rebalancing between devices: how loaded they are, what plans did, and what was not taken."""

from __future__ import annotations

from dashboards.panels import Choice, Dashboard, Panel, Query, number

_COMPUTE = '{device=~"$device", of="compute"}'
_MEMORY = '{device=~"$device", of="memory"}'

DASHBOARD = Dashboard(
    "rebalancing",
    "rebalancing between devices",
    (
        number(
            "May the controller act?",
            "0 for longer than some seconds: loomserve admin plans says why. Requests go on "
            "without it.",
            "min(loomserve_rebalancing_up)",
        ),
        number(
            "What keeps plans from being made?",
            "Parts of the measurements that are missing, stale or not settled; loomserve admin "
            "plans names them.",
            "sum(loomserve_rebalancing_flaws)",
        ),
        number(
            "How much more is asked of one device than of another?",
            "In device seconds a second. Far above 0 for long: see why candidates are not taken.",
            f"max(loomserve_rebalancing_utilisation{_COMPUTE}) "
            f"- min(loomserve_rebalancing_utilisation{_COMPUTE})",
        ),
        number(
            "How many actions failed within an hour?",
            "Growing: loomserve admin plans events tells why.",
            'sum(increase(loomserve_rebalancing_actions_total{outcome="failed"}[1h])) or vector(0)',
        ),
        Panel(
            "How much compute is asked for?",
            "Device seconds a second; above 1, more is asked than the device can do: add devices.",
            (
                Query(
                    f"sum by (device) (loomserve_rebalancing_utilisation{_COMPUTE})", "{{device}}"
                ),
            ),
        ),
        Panel(
            "How much memory is in use?",
            "As a share; KV memory that nobody uses counts as free. Near 1: replicas cannot move "
            "here.",
            (Query(f"sum by (device) (loomserve_rebalancing_utilisation{_MEMORY})", "{{device}}"),),
            "percentunit",
        ),
        Panel(
            "Which actions were taken?",
            "That have ended, a minute, by kind and outcome. failed growing: loomserve admin plans "
            "events tells why.",
            (
                Query(
                    "60 * sum by (kind, outcome) (rate(loomserve_rebalancing_actions_total[5m]))",
                    "{{kind}} {{outcome}}",
                ),
            ),
        ),
        Panel(
            "How much do actions move?",
            "Steady growth on a steady load: plans move back and forth; raise rebalancing.rising "
            "or confirm_periods.",
            (
                Query(
                    "sum by (kind) (rate(loomserve_rebalancing_moved_bytes_total[5m]))",
                    "{{kind}}",
                ),
            ),
            "Bps",
        ),
        Panel(
            "Why are candidates not taken?",
            "A minute, by reason. no_memory, pause_budget and the like name the option or the "
            "shortage that stands in the way.",
            (
                Query(
                    "60 * sum by (reason) (rate(loomserve_rebalancing_rejected_total[5m]))",
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "Which share of time do engines stand still for actions?",
            "Grows with moves of heads and layers only; lower rebalancing.pause_budget_ms if "
            "clients notice.",
            (
                Query(
                    "sum(rate(loomserve_rebalancing_pause_seconds_total[5m]))",
                    "standing still",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Why are replicas started and stopped?",
            "held with no_memory: raise devices[].memory, or pin fewer models. up and down in "
            "turn all day: raise downscale_delay_s.",
            (
                Query(
                    "60 * sum by (model, direction, reason) "
                    "(rate(loomserve_scaling_decisions_total[5m]))",
                    "{{model}} {{direction}} {{reason}}",
                ),
            ),
        ),
    ),
    Choice("device", "loomserve_rebalancing_utilisation"),
)
