"""Layers that a lender hosts, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from loomserve.platform.lending.engine.lender_worker import HostedLayers


def test_positions_behind_the_models_last_are_refused() -> None:
    layers = HostedLayers.__new__(HostedLayers)
    layers.__dict__["_config"] = SimpleNamespace(model_config=SimpleNamespace(max_model_len=64))
    rows, starts = torch.zeros(1, 1, 8), torch.tensor([0, 1], dtype=torch.int32)
    table, slots = torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="65 tokens exceeds the model's 64"):
        layers(
            rows, rows, starts, torch.tensor([65], dtype=torch.int32), table, slots, torch.empty(0)
        )
