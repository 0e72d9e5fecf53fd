"""Triton: sums and gathers among the ranks of a worker, over memory that all have mapped.

One-shot: each rank writes its part into the others' memory, waits for theirs in its own, and adds all parts
in the order of the ranks, so that a sum has the same bits on all. Each program does that by itself for its
own span, with a counter and regions of its own. Regions alternate: a rank that writes the one of the round
after next has received what the others sent in the next one, and they had read this one before that.

`_exchange` takes any size: parts first, then a flag that says that they are there. `_sum_norm` takes a few
rows: each 32 bits travel in one word with the number of their round, so that no flag follows them (as in the
protocol LL of NCCL, arXiv:2507.04786), and the norm that follows is computed at once.

Counters lie on the device: a CUDA graph can hold the kernels. A wait has a limit. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

PROGRAMS = 64
"""At most: they wait for one another, so all must fit on a GPU at the same time."""
REGION_BYTES = 2**18
"""What a program takes from each rank in a round."""
ROWS = 256
"""Of `sum_norm` at most; each is a program's."""
WORDS = 4096
"""Pairs of numbers in such a row at most."""
_BLOCK, _WARPS = 8192, 16


def _header(ranks: int) -> int:
    """Bytes of the flags: of each rank and program, int64, the number of its last round."""
    return -(-8 * ranks * PROGRAMS // 512) * 512


def _regions(ranks: int) -> int:
    """Bytes of the regions, which follow the flags; the rows follow them."""
    return 2 * ranks * PROGRAMS * REGION_BYTES


def buffer_bytes(ranks: int) -> int:
    """Of the memory that each rank shares with the others."""
    return _header(ranks) + _regions(ranks) + 2 * ranks * ROWS * WORDS * 8


@triton.jit
def _exchange(
    x,
    out,
    region,
    buffers,
    counters,
    failed,
    told,
    count,
    width,
    span,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEADER: tl.constexpr,
    REGION: tl.constexpr,
    ITEM: tl.constexpr,
    SUM: tl.constexpr,
    FLOAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    item = x.dtype.element_ty
    start = tl.multiple_of(program * span, BLOCK)
    last = tl.multiple_of(tl.minimum(start + span, count), ALIGNED)
    round = tl.load(counters + program)
    own = tl.load(buffers + RANK)
    flags = own.to(tl.pointer_type(tl.int64)) + program
    while start < last:
        round += 1
        side = (round % 2) * RANKS
        end = tl.multiple_of(tl.minimum(start + REGION // ITEM, last), ALIGNED)
        for rank in tl.static_range(RANKS):
            if rank != RANK and (SUM or rank == 0):
                # Relative to `region`, of which the compiler knows that it is aligned.
                place = HEADER + ((side + RANK) * PROGRAMS + program) * REGION
                place = tl.multiple_of((tl.load(buffers + rank) - own + place) // ITEM, 64)
                for at in range(start, end, BLOCK):
                    offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
                    inside = offsets < end
                    value = tl.load(x + offsets, mask=inside)
                    tl.store(region + place + (offsets - start), value, mask=inside)
        tl.debug_barrier()  # all threads have written
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                flag = tl.load(buffers + rank).to(tl.pointer_type(tl.int64)) + RANK * PROGRAMS + program
                # A rank that has given up says so no more: those that come later wait in vain, too.
                said = tl.where(tl.load(failed, volatile=True) == 0, round, 0)
                tl.atomic_xchg(flag, said, sem="release", scope="sys")
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                began = globaltimer()
                allowed = tl.where(tl.load(failed, volatile=True) == 0, limit, 0)
                seen = tl.load(flags + rank * PROGRAMS, volatile=True)
                while (seen < round) & (globaltimer() - began < allowed):
                    seen = tl.load(flags + rank * PROGRAMS, volatile=True)
                if tl.atomic_add(flags + rank * PROGRAMS, 0, sem="acquire", scope="sys") < round:
                    tl.store(failed, 1)
                    tl.store(told.to(tl.pointer_type(tl.int32)), 1)
        tl.debug_barrier()
        for at in range(start, end, BLOCK):
            offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
            inside = offsets < end
            if SUM:
                total = tl.zeros((BLOCK,), tl.float32 if FLOAT else item)
                for rank in tl.static_range(RANKS):
                    if rank == RANK:
                        part = tl.load(x + offsets, mask=inside, other=0)
                    else:
                        came = (HEADER + ((side + rank) * PROGRAMS + program) * REGION) // ITEM
                        theirs = region + tl.multiple_of(came, 64) + (offsets - start)
                        part = tl.load(theirs, mask=inside, other=0, cache_modifier=".cg")
                    total += part.to(total.dtype)
                tl.store(out + offsets, total.to(item), mask=inside)
            elif RANK == 0:
                row = (offsets // width).to(tl.int64)
                column = offsets % width
                for rank in tl.static_range(RANKS):
                    if rank == RANK:
                        part = tl.load(x + offsets, mask=inside)
                    else:
                        came = (HEADER + ((side + rank) * PROGRAMS + program) * REGION) // ITEM
                        theirs = region + tl.multiple_of(came, 64) + (offsets - start)
                        part = tl.load(theirs, mask=inside, cache_modifier=".cg")
                    tl.store(out + row * (width * RANKS) + rank * width + column, part, mask=inside)
        start = end
        tl.debug_barrier()  # all threads have read
    tl.store(counters + program, round)


@triton.jit
def _pair(words, dtype: tl.constexpr):
    """Both 16-bit numbers of each word, in float32."""
    low = (words & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    high = ((words >> 16) & 0xFFFF).to(tl.int16).to(dtype, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


@triton.jit
def _words(low, high, dtype: tl.constexpr):
    """The inverse; rounds."""
    first = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return first | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _now(THREADS: tl.constexpr):
    """Nanoseconds; the same number in all threads of the program, which therefore stay together."""
    times = tl.inline_asm_elementwise(
        "mov.u64 $0, %globaltimer; // $1", "=l,r", [tl.arange(0, THREADS)], tl.int64, is_pure=False, pack=1
    )
    return tl.max(times, 0)


@triton.jit
def _receive(place, inside, round, failed, told, limit, THREADS: tl.constexpr):
    """The words of this round that another rank sends to `place`."""
    tag = round.to(tl.int32)
    sent = tl.load(place, mask=inside, other=0, volatile=True)
    missing = tl.max(tl.where(inside & ((sent >> 32).to(tl.int32) != tag), 1, 0), 0)
    if missing > 0:
        began = _now(THREADS)
        late = 0
        while (missing > 0) & (late == 0):
            sent = tl.load(place, mask=inside, other=0, volatile=True)
            missing = tl.max(tl.where(inside & ((sent >> 32).to(tl.int32) != tag), 1, 0), 0)
            late = tl.where(_now(THREADS) - began > limit, 1, 0)
        if missing > 0:
            tl.store(failed, 1)
            tl.store(told.to(tl.pointer_type(tl.int32)), 1)
    return sent.to(tl.int32)


@triton.jit(do_not_specialize=["rows"])
def _sum_norm(
    residual,
    parts,
    weight,
    bias,
    out,
    region,
    buffers,
    counters,
    failed,
    told,
    eps,
    rows,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    THREADS: tl.constexpr,
):
    gdc_launch_dependents()
    gdc_wait()
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < WORDS
    round = tl.load(counters + row) + 1
    alive = tl.load(failed) == 0
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        first = parts + (part * rows + row).to(tl.int64) * (2 * WORDS) + 2 * at
        low += tl.load(first, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(first + 1, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        low += tl.load(bias + 2 * at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    own = _words(low, high, DTYPE)
    sent = (round << 32) | (own.to(tl.int64) & 0xFFFFFFFF)
    side = (round % 2) * RANKS
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = (tl.load(buffers + rank) - tl.load(buffers + RANK)) // 8
            place = tl.multiple_of(place + ((side + RANK) * ROWS + row) * STRIDE, 64)
            # A rank that has given up sends no more: those that come later wait in vain, too.
            tl.store(region + place + at, sent, mask=inside & alive)
    before = tl.load(residual + row.to(tl.int64) * WORDS + at, mask=inside, other=0)
    norms = tl.load(weight + at, mask=inside, other=0)
    low = tl.zeros((BLOCK,), tl.float32)
    high = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(RANKS):
        words = own
        if rank != RANK:
            place = tl.multiple_of(((side + rank) * ROWS + row) * STRIDE, 64)
            allowed = tl.where(alive, limit, 0)
            words = _receive(region + place + at, inside, round, failed, told, allowed, THREADS)
        theirs = _pair(words, DTYPE)
        low += theirs[0]
        high += theirs[1]
    # Rounded as a sum of its own would be.
    low, high = _pair(_words(low, high, DTYPE), DTYPE)
    old = _pair(before, DTYPE)
    low += old[0]
    high += old[1]
    tl.store(residual + row.to(tl.int64) * WORDS + at, _words(low, high, DTYPE), mask=inside)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    of = _pair(norms, DTYPE)
    normed = _words(low * scale * of[0], high * scale * of[1], DTYPE)
    tl.store(out + row.to(tl.int64) * WORDS + at, normed, mask=inside)
    tl.store(counters + row, round)


class Exchange:
    """Of one rank: its own memory and where it has mapped the others'."""

    def __init__(
        self, rank: int, buffer: torch.Tensor, buffers: torch.Tensor, told: torch.Tensor, seconds: float
    ) -> None:
        """`buffer`: uint8 [buffer_bytes], all zero once; `buffers`: int64 [ranks] on the device: addresses of
        all ranks' buffers; `told`: int32 [1] in pinned memory, set to 1 once another rank was waited for in
        vain, for `seconds`; from then on nothing waits."""
        self._rank, self._ranks, self._buffers, self._told = rank, len(buffers), buffers, told
        self._buffer, device = buffer, buffers.device
        self._rows = buffer[_header(self._ranks) + _regions(self._ranks) :].view(torch.int64)
        offset = self._rows.data_ptr() - buffer.data_ptr()
        self._row_buffers = buffers + offset
        self._counters = torch.zeros(PROGRAMS, dtype=torch.int64, device=device)
        self._row_counters = torch.zeros(ROWS, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._limit = int(seconds * 1e9)

    def sum(self, x: torch.Tensor) -> None:
        """Enqueues the sum over all ranks, in place. `x`: contiguous, of equal shape on all. Floating-point
        numbers are added in float32 and rounded once."""
        self._launch(x, x, 1, True)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Enqueues x [rows, n] of all ranks -> out [rows, ranks * n] of rank 0; others' is not written."""
        self._launch(x, out, x.shape[1], False)

    @staticmethod
    def takes(rows: int, columns: int) -> bool:
        """Whether `sum_norm` does."""
        return 0 < rows <= ROWS and columns % 8 == 0 and columns <= 2 * WORDS

    def sum_norm(
        self,
        residual: torch.Tensor,
        parts: torch.Tensor,
        weight: torch.Tensor,
        out: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
    ) -> None:
        """Enqueues: `parts` [parts, rows, columns] and `bias` [columns] are added and rounded, added over all
        ranks and rounded, and added to residual [rows, columns]; out = RMS-normalized residual times `weight`
        [columns]. All but parts and bias in 16 bits."""
        count, rows, columns = parts.shape
        assert self.takes(rows, columns) and residual.is_contiguous() and parts.is_contiguous()
        words = columns // 2
        block = triton.next_power_of_2(words)
        warps = min(8, max(1, block // 256))
        _sum_norm[(rows,)](
            residual.view(torch.int32),
            parts,
            weight.view(torch.int32),
            parts if bias is None else bias,
            out.view(torch.int32),
            self._rows,
            self._row_buffers,
            self._row_counters,
            self._failed,
            self._told.data_ptr(),
            eps,
            rows,
            self._limit,
            RANK=self._rank,
            RANKS=self._ranks,
            ROWS=ROWS,
            STRIDE=WORDS,
            WORDS=words,
            BLOCK=block,
            PARTS=count,
            BIAS=bias is not None,
            DTYPE=tl.bfloat16 if residual.dtype == torch.bfloat16 else tl.float16,
            THREADS=32 * warps,
            num_warps=warps,
            launch_pdl=True,
        )

    def _launch(self, x: torch.Tensor, out: torch.Tensor, width: int, total: bool) -> None:
        assert x.is_contiguous() and out.is_contiguous()
        count, item = x.numel(), x.element_size()
        if not count:
            return
        block = min(_BLOCK, triton.next_power_of_2(triton.cdiv(count, PROGRAMS)))
        block = max(block, 1024)
        span = triton.cdiv(triton.cdiv(count, PROGRAMS), block) * block
        _exchange[(triton.cdiv(count, span),)](
            x,
            out,
            self._buffer.view(x.dtype),
            self._buffers,
            self._counters,
            self._failed,
            self._told.data_ptr(),
            count,
            width,
            span,
            self._limit,
            RANK=self._rank,
            RANKS=self._ranks,
            PROGRAMS=PROGRAMS,
            HEADER=_header(self._ranks),
            REGION=REGION_BYTES,
            ITEM=item,
            SUM=total,
            FLOAT=x.is_floating_point(),
            ALIGNED=16 if count % 16 == 0 else 1,
            BLOCK=block,
            num_warps=max(4, block // 512),
            num_stages=1,
        )
