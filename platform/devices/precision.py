"""Which number format a CPU computes in at speed."""

from __future__ import annotations

from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
# Of which oneDNN asks all before it multiplies bfloat16: on x86 its kernels for AVX512's core.
_NATIVE = (frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}), frozenset({"bf16"}))


def cpu_dtype() -> str:
    """``auto`` (the checkpoint's own) where the CPU multiplies bfloat16 natively, else ``float32``.

    Without AVX512 or AMX, bfloat16 products are emulated: a 512 x 576 by 576 x 1536 product takes
    nine times as long as in float32, and an engine's start minutes instead of seconds.
    """
    # Not torch's own word for it, which takes the controller seconds to import.
    flags = _flags()
    return "auto" if any(features <= flags for features in _NATIVE) else "float32"


def _flags() -> frozenset[str]:
    """What the first processor says that it can do; on Arm these are features."""
    with _CPUINFO.open(encoding="utf-8") as lines:
        fields = (line.partition(":") for line in lines)
        flags = (said for name, _, said in fields if name.strip() in {"flags", "Features"})
        return frozenset(next(flags, "").split())
