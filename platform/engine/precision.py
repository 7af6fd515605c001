"""Which number format a CPU computes in at speed."""

from __future__ import annotations

import torch


def cpu_dtype() -> str:
    """``auto`` (the checkpoint's own) where the CPU multiplies bfloat16 natively, else ``float32``.

    Without AVX512 or AMX, bfloat16 products are emulated: a 512 x 576 by 576 x 1536 product takes
    nine times as long as in float32, and an engine's start minutes instead of seconds.
    """
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "auto"
    return "float32"
