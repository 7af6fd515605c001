"""What Triton's kernels here need beyond Triton: a typed decorator, a clock, and a rest.

Interpreted (``TRITON_INTERPRET=1`` before Triton is imported) the same kernels run as Python on CPU
tensors, between processes too: the interpreter's atomics are the processor's. It knows no inline
assembly, so clock, rest and release have a form for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

INTERPRETED: bool = triton.knobs.runtime.interpret

LOOKS = tl.constexpr(64)
"""In so many looks for a flag there is one for the loan's end and the clock; the loan's word is in
the host's memory, or the other end's."""


def kernel(*fixed: str) -> Callable[[Callable[..., Any]], Any]:
    """Compile a function with Triton; of the parameters named, no value has a variant of its own.
    Else Triton compiles a kernel again for the layer 1, and for each layer that 16 divides."""

    def compiled(function: Callable[..., Any]) -> Any:
        return triton.jit(function, do_not_specialize=list(fixed))

    return compiled


Launch = Callable[..., None]
"""Takes a kernel, its grid and its arguments: :func:`launch` or :func:`compile_for`."""


def launch(compiled: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    compiled[grid](*given, **named)


def compile_for(compiled: Any, grid: tuple[int, ...], *given: Any, **named: Any) -> None:
    """Compile a kernel for such arguments, so that :func:`launch` with their like does not."""
    compiled.warmup(*given, grid=grid, **named)


if INTERPRETED:

    def now_ns() -> Any:
        """Return the nanoseconds of a clock that all processes of this machine share."""
        return tl.full((), time.monotonic_ns(), tl.int64)

    def rest() -> None:
        """Let others run between two looks at a flag."""
        time.sleep(100e-6)

    def release(flag: tl.tensor, number: tl.tensor) -> None:
        """Store a flag behind all that this program wrote, for who acquires it on any device. It is
        no atomic, which a link between GPUs may lack (``cudaDevP2PAttrNativeAtomicSupported``)."""
        tl.atomic_xchg(flag, number, sem="release", scope="sys")

else:

    @kernel()
    def now_ns() -> Any:
        # Of the GPU, alike for all its kernels; how coarsely it ticks depends on the GPU.
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @kernel()
    def rest() -> Any:
        # The warp leaves its scheduler for some 100 ns. The result is there for Triton alone.
        tl.inline_asm_elementwise(
            "nanosleep.u32 100; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )

    @kernel()
    def release(flag: tl.tensor, number: tl.tensor) -> None:
        # By one thread; a barrier before it makes the others' stores this one's, too.
        tl.inline_asm_elementwise(
            "{ .reg .pred first; .reg .u32 thread; mov.u32 thread, %tid.x;"
            " setp.eq.u32 first, thread, 0;"
            " @first st.release.sys.global.b64 [$1], $2; mov.u32 $0, 0; }",
            "=r,l,l",
            [flag, number],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
