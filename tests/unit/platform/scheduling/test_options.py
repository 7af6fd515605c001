"""What an engine's scheduler is told where the configuration leaves it open."""

from __future__ import annotations

from loomserve.platform.config import parse
from loomserve.platform.config.lengths import Lengths
from loomserve.platform.config.model_fields import Scheduling
from loomserve.platform.scheduling.options import scheduler_options


def test_a_queue_is_fair_by_default_only_where_lengths_are_predicted() -> None:
    (model,) = parse("models: {chat: demo}").models
    foreseen = model.model_copy(update={"lengths": Lengths(predictor="chat")})
    told = foreseen.model_copy(update={"scheduling": Scheduling(queue="sjf")})
    queues = [scheduler_options(each, None).queue for each in (model, foreseen, told)]
    assert queues == ["fcfs", "fair", "sjf"]
