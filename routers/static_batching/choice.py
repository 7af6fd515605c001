"""The batching policy that a configuration chooses."""

from __future__ import annotations

from loomserve.platform.config.batching import Batching
from loomserve.routers.static_batching.base import Batcher
from loomserve.routers.static_batching.fifo import Fifo
from loomserve.routers.static_batching.s3 import s3
from loomserve.routers.static_batching.slo_odbs import SloOdbs, odbs, slo_dbs
from loomserve.routers.static_batching.wma import Wma


def batcher(rules: Batching) -> Batcher:
    """Forms batches as the section says."""
    match rules.policy:
        case "s3":
            return s3
        case "wma":
            return Wma(rules.most_waste)
        case "slo_odbs":
            return SloOdbs(rules.threshold, rules.slo_weight, rules.output_weight)
        case "slo_dbs":
            return slo_dbs(rules.threshold, rules.output_weight)
        case "odbs":
            return odbs(rules.threshold, rules.slo_weight)
        case "fifo":
            assert rules.size is not None
            return Fifo(rules.size)
