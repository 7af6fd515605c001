"""Lending between engines: what is lent, how long borrowers wait, and what lenders do for them."""

from __future__ import annotations

from dashboards.panels import MODEL, Choice, Dashboard, Panel, Query, number, ratio, total

_GRANTED = f"sum by (model, lender) (loomserve_lending_borrowed_blocks{MODEL})"
_FREE = f"sum by (model, lender) (loomserve_lending_borrowed_free_blocks{MODEL})"

DASHBOARD = Dashboard(
    "lending",
    "lending between engines",
    (
        number(
            "How many loans are there?",
            "None although lending is on: loomserve admin lending says why.",
            f"count(loomserve_lending_borrowed_blocks{MODEL}) or vector(0)",
        ),
        number(
            "How many requests are with lenders?",
            "Running requests whose KV lies with a lender.",
            f"sum(loomserve_lending_requests{MODEL}) or vector(0)",
        ),
        number(
            "Which share of time do borrowers wait?",
            "Of the borrowers that there are, the one that waits the longest.",
            f"max({total('loomserve_lending_wait_seconds_total', 'replica', MODEL)}) or vector(0)",
            "percentunit",
        ),
        number(
            "How many loans broke within an hour?",
            "Steady growth: the last panel says why.",
            f"sum(increase(loomserve_lending_broken_loans_total{MODEL}[1h])) or vector(0)",
        ),
        Panel(
            "How many KV blocks are borrowed?",
            "What lenders grant, and what of it holds requests' KV. Falls while a lender's own "
            "requests need its memory.",
            (
                Query(_GRANTED, "{{model}} from {{lender}} granted"),
                Query(f"{_GRANTED} - {_FREE}", "{{model}} from {{lender}} in use"),
            ),
        ),
        Panel(
            "How many requests are with which lender?",
            "None although others wait: adaptive finds attention there too slow; look at the "
            "waits.",
            (
                Query(
                    f"sum by (model, lender) (loomserve_lending_requests{MODEL})",
                    "{{model}} with {{lender}}",
                ),
            ),
        ),
        Panel(
            "How long does a borrower wait for a layer?",
            "Mean time for a lender's result after its own part is done. Rising: too many requests "
            "lie there, or the lender is busy.",
            (
                Query(
                    ratio(
                        total("loomserve_lending_wait_seconds_total", "model, lender", MODEL),
                        total("loomserve_lending_tasks_total", "model, lender", MODEL),
                    ),
                    "{{model}} for {{lender}}",
                ),
            ),
            "s",
        ),
        Panel(
            "What was the longest wait for a layer?",
            "Since the loan was opened. Near lending.patience_ms the lender is given up: something "
            "else runs on its cores.",
            (
                Query(
                    f"max by (model, lender) (loomserve_lending_longest_wait_seconds{MODEL})",
                    "{{model}} for {{lender}}",
                ),
            ),
            "s",
        ),
        Panel(
            "Which share of time does each borrower wait?",
            "Of each second: 0.1 means that a tenth of the borrower's time is lost to waiting.",
            (
                Query(
                    total("loomserve_lending_wait_seconds_total", "model, replica, lender", MODEL),
                    "{{model}} {{replica}} for {{lender}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "Which share of time do lenders compute for borrowers?",
            "Of each second, on the lender's device. A large share: the lender's own requests feel "
            "it; see its time between tokens.",
            (
                Query(
                    total(
                        "loomserve_lending_service_seconds_total", "model, replica, borrower", MODEL
                    ),
                    "{{model}} {{replica}} for {{borrower}}",
                ),
            ),
            "percentunit",
        ),
        Panel(
            "How many KV blocks are lent?",
            "The lenders' own blocks that borrowers have. Falls when the lenders' requests need "
            "them.",
            (
                Query(
                    f"sum by (model, borrower) (loomserve_lending_lent_blocks{MODEL})",
                    "{{model}} to {{borrower}}",
                ),
            ),
        ),
        Panel(
            "Why do loans break?",
            "Their requests are computed again. TIMED_OUT: raise lending.patience_ms, or switch "
            "the pair off. REVOKED: lower lending.lend_memory.",
            (
                Query(
                    total("loomserve_lending_broken_loans_total", "model, reason", MODEL),
                    "{{model}} {{reason}}",
                ),
            ),
            "ops",
        ),
    ),
    Choice("model", "vllm:num_requests_running"),
)
