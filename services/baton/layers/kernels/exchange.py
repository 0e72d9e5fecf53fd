"""Triton: sums and gathers among the ranks of a worker, over memory that all have mapped.

One-shot: each rank writes its part where the others read it, raises a flag, waits for theirs, and reads all
parts in the order of the ranks. So a sum has the same bits on all ranks. Each program does that by itself for
its own span, with a flag, a counter and two regions of its own: a rank that writes its region for the round
after next has seen that all others have begun the next one, and so have read this one.

Counters lie on the device: a CUDA graph can hold the kernel. A wait has a limit. Needs a GPU: import it where
one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 64
"""At most: they wait for one another, so all must fit on a GPU at the same time."""
REGION_BYTES = 2**19
"""What a program exchanges in a round."""
HEADER_BYTES = 8 * PROGRAMS
"""Before the regions: each program's flag, int64, the number of its last round."""
BUFFER_BYTES = HEADER_BYTES + 2 * PROGRAMS * REGION_BYTES
POLLS_A_SECOND = 4_400_000
"""Reads of a flag by each of 32 programs, measured on an H200."""
_BLOCK = 1024


@triton.jit
def _exchange(
    x,
    out,
    buffers,
    counters,
    failed,
    told,
    count,
    width,
    span,
    polls,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEADER: tl.constexpr,
    REGION: tl.constexpr,
    ITEM: tl.constexpr,
    SUM: tl.constexpr,
    FLOAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    item = x.dtype.element_ty
    start = program * span
    last = tl.minimum(start + span, count)
    round = tl.load(counters + program)
    left = tl.where(tl.load(failed) == 0, polls, 0)
    own = tl.load(buffers + RANK)
    while start < last:
        round += 1
        end = tl.minimum(start + REGION // ITEM, last)
        place = HEADER + ((round % 2) * PROGRAMS + program) * REGION
        mine = (own + place).to(tl.pointer_type(item))
        for at in range(start, end, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < end
            tl.store(mine + (offsets - start), tl.load(x + offsets, mask=inside), mask=inside)
        tl.debug_barrier()  # all threads have written
        # A rank that has given up says so no more: those that come later wait in vain, too.
        said = tl.where(left > 0, round, 0)
        tl.atomic_xchg(own.to(tl.pointer_type(tl.int64)) + program, said, sem="release", scope="sys")
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                flag = tl.load(buffers + rank).to(tl.pointer_type(tl.int64)) + program
                seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                while (seen < round) & (left > 0):
                    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
                    left -= 1
                if seen < round:
                    tl.store(failed, 1)
                    tl.store(told.to(tl.pointer_type(tl.int32)), 1)
        tl.debug_barrier()
        for at in range(start, end, BLOCK):
            offsets = at + tl.arange(0, BLOCK)
            inside = offsets < end
            within = offsets - start
            if SUM:
                first = (tl.load(buffers) + place).to(tl.pointer_type(item))
                total = tl.load(first + within, mask=inside, cache_modifier=".cg")
                if FLOAT:
                    total = total.to(tl.float32)
                for rank in tl.static_range(1, RANKS):
                    theirs = (tl.load(buffers + rank) + place).to(tl.pointer_type(item))
                    total += tl.load(theirs + within, mask=inside, cache_modifier=".cg").to(total.dtype)
                tl.store(out + offsets, total.to(item), mask=inside)
            elif RANK == 0:
                row = (offsets // width).to(tl.int64)
                column = offsets % width
                for rank in tl.static_range(RANKS):
                    theirs = (tl.load(buffers + rank) + place).to(tl.pointer_type(item))
                    part = tl.load(theirs + within, mask=inside, cache_modifier=".cg")
                    tl.store(out + row * (width * RANKS) + rank * width + column, part, mask=inside)
        start = end
    tl.store(counters + program, round)


class Exchange:
    """Of one rank: its own buffer and where it has mapped those of all."""

    def __init__(self, rank: int, buffers: torch.Tensor, told: torch.Tensor, seconds: float) -> None:
        """`buffers`: int64 [ranks] on the device: addresses of BUFFER_BYTES each, that were all zero once;
        `told`: int32 [1] in pinned memory, set to 1 once another rank was waited for in vain, for about
        `seconds`; from then on nothing waits."""
        self._rank, self._ranks, self._buffers, self._told = rank, len(buffers), buffers, told
        self._counters = torch.zeros(PROGRAMS, dtype=torch.int64, device=buffers.device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=buffers.device)
        self._polls = int(seconds * POLLS_A_SECOND)

    def sum(self, x: torch.Tensor) -> None:
        """Enqueues the sum over all ranks, in place. `x`: contiguous, of equal shape on all. Floating-point
        numbers are added in float32 and rounded once."""
        self._launch(x, x, 1, True)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueues x [rows, n] of all ranks -> out [rows, ranks * n] of rank 0; others' is not written."""
        self._launch(x, out, x.shape[1], False)

    def _launch(self, x: torch.Tensor, out: torch.Tensor, width: int, total: bool) -> None:
        assert x.is_contiguous() and out.is_contiguous()
        count = x.numel()
        if not count:
            return
        span = triton.cdiv(triton.cdiv(count, PROGRAMS), _BLOCK) * _BLOCK
        _exchange[(triton.cdiv(count, span),)](
            x,
            out,
            self._buffers,
            self._counters,
            self._failed,
            self._told.data_ptr(),
            count,
            width,
            span,
            self._polls,
            RANK=self._rank,
            RANKS=self._ranks,
            PROGRAMS=PROGRAMS,
            HEADER=HEADER_BYTES,
            REGION=REGION_BYTES,
            ITEM=x.element_size(),
            SUM=total,
            FLOAT=x.is_floating_point(),
            BLOCK=_BLOCK,
            num_stages=1,
        )
