"""Triton: sums and gathers among the ranks of a worker, over memory that all have mapped.

In one shot each rank writes its part into the others' memory, waits for theirs in its own, and adds all parts
in the order of the ranks, so that a sum has the same bits on all. More than two ranks add large sums in two:
each adds up a share of the numbers, of which the others send it their parts, and sends the sum to them. The
bits are the same; of four ranks, each sends 1.5 times the numbers, not 3 times.

Each program does that by itself for its own span, with flags, a counter and regions of its own, in steps: it
writes to the others, says so by the step's number in their flags, waits until all have said so, and reads
what came before it says the next number. Regions alternate: a rank that writes over what the step before
last has left there has waited for the step after that, which the others had said when they had read it.

`all_reduce_rmsnorm.py` has a kernel of its own for a few rows.

Counters lie on the device: a CUDA graph can hold the kernels. A wait has a limit. Needs a GPU: import it
where one is in use.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from baton.layers.kernels.all_reduce_rmsnorm import now, sum_norm

PROGRAMS = 64
"""At most: they wait for one another, so all must fit on a GPU at the same time."""
REGION_BYTES = 2**18
"""What a program takes from each rank in a step; in two shots one half for parts, one for sums."""
ROWS = 256
"""Most rows of `sum_norm`; each is a program's."""
WORDS = 4096
"""Pairs of numbers in such a row at most."""
ONE_SHOT_BYTES = 2**22
"""For more than two ranks: sums of which all ranks together have no more are taken in one shot."""
TWO_SHOT_ROWS = 48, 128
"""For more than two ranks: from so many rows on `sum_norm` takes two shots, and it takes so many at most.
Both as measured with four H100s and rows of 4,096."""
_BLOCK = 8192


def _header(ranks: int) -> int:
    """Bytes of the flags: of each rank and program, int64, the number of its last step."""
    return -(-8 * ranks * PROGRAMS // 512) * 512


def _regions(ranks: int) -> int:
    """Bytes of the regions, which follow the flags; the rows follow them."""
    return 2 * ranks * PROGRAMS * REGION_BYTES


def buffer_bytes(ranks: int) -> int:
    """Bytes of the memory that each rank shares with the others."""
    return _header(ranks) + _regions(ranks) + 2 * ranks * ROWS * WORDS * 8


@triton.jit
def _acquire(flags):
    """Their values; what was written before them is there."""
    return tl.inline_asm_elementwise(
        "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [flags], tl.int64, is_pure=False, pack=1
    )


@triton.jit
def _step(
    buffers, round, failed, told, limit,
    RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Tells the other ranks that all threads of the program have written and read, and waits until they say
    so, too. Returns `limit`, or 0 once it has waited in vain."""
    to, by = tl.arange(0, triton.next_power_of_2(RANKS)), tl.arange(0, THREADS) % RANKS
    others = (to != RANK) & (to < RANKS)
    theirs = tl.load(buffers + to, mask=others, other=0).to(tl.pointer_type(tl.int64)) + tl.program_id(0)
    flags = tl.load(buffers + RANK).to(tl.pointer_type(tl.int64)) + tl.program_id(0) + by * PROGRAMS
    # A rank that has given up says so no more: those that come later wait in vain, too.
    said = tl.where(limit > 0, round, 0)
    tl.debug_barrier()
    # One instruction for all: a release waits until all that was written before has arrived.
    tl.atomic_xchg(theirs + RANK * PROGRAMS, said, mask=others, sem="release", scope="sys")
    missing = tl.max(tl.where((by != RANK) & (_acquire(flags) < round), 1, 0), 0)
    if missing > 0:
        began = now(THREADS)
        late = 0
        while (missing > 0) & (late == 0):
            missing = tl.max(tl.where((by != RANK) & (_acquire(flags) < round), 1, 0), 0)
            late = tl.where(now(THREADS) - began > limit, 1, 0)
        if missing > 0:
            limit = limit * 0
            tl.store(failed, 1)
            tl.store(told.to(tl.pointer_type(tl.int32)), 1)
    return limit


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
    THREADS: tl.constexpr,
):
    program = tl.program_id(0)
    item = x.dtype.element_ty
    start = tl.multiple_of(program * span, BLOCK)
    last = tl.multiple_of(tl.minimum(start + span, count), ALIGNED)
    round = tl.load(counters + program)
    own_buffer = tl.load(buffers + RANK)
    limit = tl.where(tl.load(failed) == 0, limit, 0)
    while start < last:
        round += 1
        side = (round % 2) * RANKS
        end = tl.multiple_of(tl.minimum(start + REGION // ITEM, last), ALIGNED)
        for rank in tl.static_range(RANK + 1, RANK + RANKS):
            if SUM or rank % RANKS == 0:
                # Relative to `region`, of which the compiler knows that it is aligned.
                offset = HEADER + ((side + RANK) * PROGRAMS + program) * REGION
                offset = tl.multiple_of((tl.load(buffers + rank % RANKS) - own_buffer + offset) // ITEM, 64)
                for at in range(start, end, BLOCK):
                    offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
                    inside = (offsets < end) & (limit > 0)
                    value = tl.load(x + offsets, mask=inside)
                    tl.store(region + offset + (offsets - start), value, mask=inside)
        limit = _step(buffers, round, failed, told, limit, RANK, RANKS, PROGRAMS, THREADS)
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
    tl.store(counters + program, round)


@triton.jit
def _sum_in_two(
    x,
    region,
    buffers,
    counters,
    failed,
    told,
    count,
    span,
    limit,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HEADER: tl.constexpr,
    REGION: tl.constexpr,
    ITEM: tl.constexpr,
    FLOAT: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Step by step: sends the parts of a piece of the span, sums and sends its own of the piece before, and
    takes the sums of the piece before that."""
    program = tl.program_id(0)
    item = x.dtype.element_ty
    first = tl.multiple_of(program * span, BLOCK)
    last = tl.multiple_of(tl.minimum(first + span, count), ALIGNED)
    round = tl.load(counters + program)
    own_buffer = tl.load(buffers + RANK)
    limit = tl.where(tl.load(failed) == 0, limit, 0)
    PIECE: tl.constexpr = REGION // ITEM
    SUMS: tl.constexpr = PIECE // 2  # of a region: parts lie before, sums behind
    tl.static_assert((PIECE + RANKS * BLOCK - 1) // (RANKS * BLOCK) * BLOCK <= SUMS)
    rounds = tl.cdiv(last - first, PIECE) + 1
    for step in range(rounds + 1):
        round += 1
        here = ((round % 2) * RANKS * PROGRAMS + program) * REGION + HEADER
        before = (((round + 1) % 2) * RANKS * PROGRAMS + program) * REGION + HEADER
        start = first + step * PIECE
        end, part = _part(start, last, PIECE, RANKS, ALIGNED, BLOCK)
        for rank in tl.static_range(RANK + 1, RANK + RANKS):
            offset = (tl.load(buffers + rank % RANKS) - own_buffer + here + RANK * PROGRAMS * REGION) // ITEM
            begin = tl.multiple_of(start + rank % RANKS * part, BLOCK)
            upto = tl.multiple_of(tl.minimum(begin + part, end), ALIGNED)
            for at in range(begin, upto, BLOCK):
                offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
                inside = (offsets < upto) & (limit > 0)
                value = tl.load(x + offsets, mask=inside)
                tl.store(region + tl.multiple_of(offset, 64) + (offsets - begin), value, mask=inside)
        if step > 0:
            start -= PIECE
            end, part = _part(start, last, PIECE, RANKS, ALIGNED, BLOCK)
            begin = tl.multiple_of(start + RANK * part, BLOCK)
            upto = tl.multiple_of(tl.minimum(begin + part, end), ALIGNED)
            for at in range(begin, upto, BLOCK):
                offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
                inside = offsets < upto
                total = tl.zeros((BLOCK,), tl.float32 if FLOAT else item)
                for rank in tl.static_range(RANKS):
                    if rank == RANK:
                        value = tl.load(x + offsets, mask=inside, other=0)
                    else:
                        came = tl.multiple_of((before + rank * PROGRAMS * REGION) // ITEM, 64)
                        theirs = region + came + (offsets - begin)
                        value = tl.load(theirs, mask=inside, other=0, cache_modifier=".cg")
                    total += value.to(total.dtype)
                tl.store(x + offsets, total.to(item), mask=inside)
                for rank in tl.static_range(RANK + 1, RANK + RANKS):
                    offset = tl.load(buffers + rank % RANKS) - own_buffer + here + RANK * PROGRAMS * REGION
                    offset = tl.multiple_of(offset // ITEM + SUMS, 64)
                    sums = region + offset + (offsets - begin)
                    tl.store(sums, total.to(item), mask=inside & (limit > 0))
        if step > 1:
            start -= PIECE
            end, part = _part(start, last, PIECE, RANKS, ALIGNED, BLOCK)
            for rank in tl.static_range(RANK + 1, RANK + RANKS):
                came = tl.multiple_of((before + rank % RANKS * PROGRAMS * REGION) // ITEM + SUMS, 64)
                begin = tl.multiple_of(start + rank % RANKS * part, BLOCK)
                upto = tl.multiple_of(tl.minimum(begin + part, end), ALIGNED)
                for at in range(begin, upto, BLOCK):
                    offsets = tl.multiple_of(at, BLOCK) + tl.arange(0, BLOCK)
                    inside = offsets < upto
                    value = tl.load(region + came + (offsets - begin), mask=inside, cache_modifier=".cg")
                    tl.store(x + offsets, value, mask=inside)
        if step < rounds:
            limit = _step(buffers, round, failed, told, limit, RANK, RANKS, PROGRAMS, THREADS)
    tl.store(counters + program, round - 1)


@triton.jit
def _part(start, last, PIECE: tl.constexpr, RANKS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Where the piece that starts there ends, and how many of its numbers each rank sums."""
    end = tl.maximum(tl.minimum(start + PIECE, last), start)
    return tl.multiple_of(end, ALIGNED), tl.cdiv(end - start, RANKS * BLOCK) * BLOCK


class AllReduce:
    """One rank's side of the collectives: its own memory, and where it has mapped the others'."""

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

    def takes(self, rows: int, columns: int) -> bool:
        """Whether `sum_norm` does, and with two or four ranks in less time than `sum` and a norm."""
        return (
            0 < rows <= (ROWS if self._ranks <= 2 else TWO_SHOT_ROWS[1])
            and columns % 8 == 0
            and columns <= 2 * WORDS
        )

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
        sum_norm[(rows,)](
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
            TWO=self._ranks > 2 and rows >= TWO_SHOT_ROWS[0],
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
        two = total and self._ranks > 2 and count * item * self._ranks > ONE_SHOT_BYTES
        sharers = self._ranks if two else 1
        block = min(_BLOCK, triton.next_power_of_2(triton.cdiv(count, PROGRAMS * sharers)))
        block = max(block, 1024)
        span = triton.cdiv(triton.cdiv(count, PROGRAMS), block * sharers) * block * sharers
        warps = max(4, block // 512)
        shared = (self._buffers, self._counters, self._failed, self._told.data_ptr(), count)
        options = {
            "RANK": self._rank,
            "RANKS": self._ranks,
            "PROGRAMS": PROGRAMS,
            "HEADER": _header(self._ranks),
            "REGION": REGION_BYTES,
            "ITEM": item,
            "FLOAT": x.is_floating_point(),
            "ALIGNED": 16 if count % 16 == 0 else 1,
            "BLOCK": block,
            "THREADS": 32 * warps,
            "num_warps": warps,
            "num_stages": 1,
        }
        region, grid = self._buffer.view(x.dtype), (triton.cdiv(count, span),)
        if two:
            _sum_in_two[grid](x, region, *shared, span, self._limit, **options)
        else:
            _exchange[grid](x, out, region, *shared, width, span, self._limit, SUM=total, **options)
