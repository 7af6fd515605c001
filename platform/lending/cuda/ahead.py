"""The kernels compiled ahead of time, on a machine that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loomserve.platform.lending.cuda.borrowing import DeviceBorrower
from loomserve.platform.lending.cuda.buffer import TaskBuffer, TaskShape
from loomserve.platform.lending.cuda.kernel import INTERPRETED
from loomserve.platform.lending.cuda.resident import serve_for
from loomserve.platform.lending.cuda.serving import DeviceLender

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
_APART = 16
"""Rows between blocks that lie abreast, as any number of them compiles alike."""


def compiled(shape: TaskShape, capability: int, abreast: int = 1) -> dict[str, Any]:
    """Compile all kernels for a shape and a GPU, such as 90 for sm_90; returns them by name, with
    ``asm["ptx"]`` and ``asm["cubin"]``. ``RuntimeError`` if Triton interprets kernels here."""
    if INTERPRETED:
        raise RuntimeError("interpreted kernels cannot be compiled: unset TRITON_INTERPRET")
    found: dict[str, Any] = {}

    def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
        arguments = dict(zip(kernel.arg_names, given, strict=False)) | named
        found[kernel.fn.__name__] = _compiled(kernel, arguments, capability)

    # Memory without content, as kernels depend on types and alignment alone.
    buffer = TaskBuffer.allocate(shape, "meta", "meta")
    DeviceBorrower(shape, buffer, patience_s=1.0).compile(launch)
    size = ((abreast - 1) * _APART + 1, shape.kv_heads, shape.block_size, shape.head_size)
    cache = torch.empty(size, dtype=shape.dtype, device="meta")
    lender = DeviceLender(
        shape,
        buffer,
        [(cache, cache)] * shape.layers,
        granted=torch.zeros(1, dtype=torch.int64, device="meta"),
        abreast=abreast,
        apart=_APART,
    )
    with lender.compiling(launch):
        lender.serve()
        serve_for(lender, seconds=1.0, programs=1)
    return found


def _compiled(kernel: Any, arguments: dict[str, Any], capability: int) -> Any:
    names = [parameter.name for parameter in kernel.params]
    fixed = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
    signature = {name: "constexpr" if name in fixed else _type(arguments[name]) for name in names}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        path: [["tt.divisibility", 16]]
        for place, parameter in enumerate(kernel.params)
        if not parameter.is_constexpr
        for path in _aligned(arguments[parameter.name], (place,), parameter.do_not_specialize)
    }
    options = {name: arguments[name] for name in ("num_warps", "num_stages") if name in arguments}
    return triton.compile(
        ASTSource(kernel, signature, constexprs=fixed, attrs=aligned),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def _type(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _TYPES[argument.dtype]
    # Of a named tuple, as Triton takes the names from it.
    return "i32" if isinstance(argument, int) else type(argument)(*map(_type, argument))


def _aligned(argument: Any, path: tuple[int, ...], any_number: bool) -> Iterator[tuple[int, ...]]:
    """Yield the paths of what Triton finds at a launch to be a multiple of 16."""
    if isinstance(argument, tuple):
        for place, each in enumerate(argument):
            yield from _aligned(each, (*path, place), any_number)
    elif not any_number and (isinstance(argument, torch.Tensor) or argument % 16 == 0):
        yield path
