"""Triton: what products need whose tall operand is computed in registers. Needs a GPU: import it where one is
in use."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def awaited(total):
    """The float32 sums of a step, when they are complete.

    Triton would go on while the tensor cores still multiply, and the assembler before CUDA 13.3 gives the
    operand's registers to what is computed next: sums were wrong (triton-lang/triton issue 9433 and pull
    request 11781). What looks like a use of the sums is no instruction; the wait before it is.
    """
    return tl.inline_asm_elementwise("", "=f,0", [total], dtype=tl.float32, is_pure=True, pack=1)
