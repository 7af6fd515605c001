"""The kernels compiled ahead of time, on a machine that needs no GPU."""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loomserve.platform.lending.cuda import attention, borrowing, resident, serving
from loomserve.platform.lending.cuda.buffer import TaskShape
from loomserve.platform.lending.cuda.kernel import INTERPRETED

_NUMBERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
_WORDS = ("posted", "closed", "state", "done", "caches", "granted", "slots")
_INDICES = ("requests", "contexts", "block_table", "ended")
_ROWS = ("query", "key", "value", "to_query", "to_key", "to_value", "output", "from_output")
_SUMS = ("lse", "from_lse", "sums", "gathered")

KERNELS = (
    borrowing.post_rows,
    borrowing.wait_for_answer,
    borrowing.fetch_rows,
    borrowing.merge_rows,
    serving.poll_task,
    serving.write_rows,
    attention.attend_rows,
    resident.serve_tasks,
)


def compiled(shape: TaskShape, capability: int, abreast: int = 1) -> dict[str, Any]:
    """Compile all kernels for a shape and a GPU, such as 90 for sm_90.

    Args:
        abreast: blocks of the borrower's that lie beside one another.

    Returns:
        Triton's compiled kernels by name; ``asm["ptx"]`` and ``asm["cubin"]`` of each.

    Raises:
        RuntimeError: Triton interprets its kernels in this process.
    """
    if INTERPRETED:
        raise RuntimeError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    return {one.fn.__name__: _compiled(one, shape, capability, abreast) for one in KERNELS}


def _compiled(kernel: Any, shape: TaskShape, capability: int, abreast: int) -> Any:
    types = dict.fromkeys(_WORDS, "*i64") | dict.fromkeys(_INDICES, "*i32")
    types |= dict.fromkeys(_ROWS, _NUMBERS[shape.dtype]) | dict.fromkeys(_SUMS, "*fp32")
    group = shape.query_heads // shape.kv_heads
    one_warp = kernel in (borrowing.wait_for_answer, serving.poll_task)
    width = shape.query_width if kernel is borrowing.fetch_rows else shape.key_width
    fixed = {
        "query_width": shape.query_width,
        "key_width": shape.key_width,
        "width": width,
        "query_heads": shape.query_heads,
        "kv_heads": shape.kv_heads,
        "abreast": abreast,
        "head_size": shape.head_size,
        "padded": attention.padded_head(shape),
        "padded_head": attention.padded_head(shape),
        "group": group,
        "padded_group": attention.padded_group(shape),
        "block_size": shape.block_size,
        "scale": shape.scale,
        "tile": borrowing.TILE,
        "row_tile": serving.ROW_TILE,
        "context_tile": attention.CONTEXT_TILE,
        "part_tiles": attention.PART_TILES,
        "most_parts": attention.most_parts(shape, attention.PART_TILES),
    }
    names = [parameter.name for parameter in kernel.params]
    constants = {p.name: fixed[p.name] for p in kernel.params if p.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32") for name in names
    }
    # As Triton finds at a launch: torch's memory, and strides within it, are multiples of 16.
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (place,): [["tt.divisibility", 16]]
        for place, (name, kind) in enumerate(signature.items())
        if kind.startswith("*") or name.endswith("_stride")
    }
    options = {"num_warps": 1 if one_warp else 4}
    return triton.compile(
        ASTSource(kernel, signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=attention.ATTENDING if kernel is attention.attend_rows else options,
    )
