"""A process that holds a part of each page of a pool on the GPU:
`python part_owner.py GPU PAGES PAGE_BYTES FIRST SIZE FILLED`.

Fills it with what `content` says, or with UNTOUCHED, and prints it, a CudaIpcPart in hexadecimal. Answers
each line on stdin with a hash of all its bytes, and ends with stdin.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from baton.transport.cuda_ipc import export_part

LEAD = 1536
UNTOUCHED = 0xEE


def content(page: int, page_bytes: int) -> torch.Tensor:
    """uint8 [page_bytes], on the CPU."""
    generator = torch.Generator().manual_seed(page)
    return torch.randint(0, 256, (page_bytes,), dtype=torch.uint8, generator=generator)


def main() -> None:
    gpu, pages, page_bytes, first, size, filled = map(int, sys.argv[1:])
    torch.cuda.set_device(gpu)
    memory = torch.full((LEAD + (pages + 1) * size,), UNTOUCHED, dtype=torch.uint8, device="cuda")
    part = memory[LEAD:].view(pages + 1, size)
    for page in range(pages if filled else 0):
        part[page].copy_(content(page, page_bytes)[first : first + size])
    torch.cuda.synchronize()
    print(export_part(part, first).SerializeToString().hex(), flush=True)
    for _ in sys.stdin:
        torch.cuda.synchronize()
        print(hashlib.sha256(part[:pages].cpu().numpy().tobytes()).hexdigest(), flush=True)


if __name__ == "__main__":
    main()
