"""A process that owns a pool on a GPU: `python pool_owner.py DIRECTORY PAGES PAGE_BYTES INCARNATION`.

The pool begins in the middle of a larger tensor. Prints the endpoint in hexadecimal, or "error ..."; then
obeys lines on stdin, and ends with stdin:
    refill SEED      other contents in all pages, and generations one higher
    step NUMBER SEED launches a step that fills all pages, late; it has retired when the next line is obeyed
    busy, idle       matrix products in a loop, or none
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import torch

from baton.transport import Segment, TransportError
from baton.transport.cuda_ipc import cuda_ipc_endpoint
from baton.transport.cuda_pages import CudaPages

LEAD = 1536
STEP_CYCLES = 200_000_000
"""About 0.1 s."""


def page_content(page: int, page_bytes: int, seed: int = 0) -> torch.Tensor:
    """On the current GPU; the same on all of one kind."""
    generator = torch.Generator(device="cuda").manual_seed(seed * 1_000_000 + page)
    return torch.randint(0, 256, (page_bytes,), dtype=torch.uint8, device="cuda", generator=generator)


class Load(threading.Thread):
    """Matrix products until `stop`; counts them."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._stop_asked = threading.Event()

    def run(self) -> None:
        a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
        while not self._stop_asked.is_set():
            for _ in range(20):
                torch.mm(a, a)
            torch.cuda.synchronize()
            self.count += 20

    def stop(self) -> int:
        self._stop_asked.set()
        self.join()
        return self.count


def main() -> None:
    directory, *numbers = sys.argv[1:]
    pages, page_bytes, incarnation = map(int, numbers)
    memory = torch.zeros(LEAD + (pages + 1) * page_bytes, dtype=torch.uint8, device="cuda")
    pool = CudaPages(memory[LEAD:].view(pages + 1, page_bytes), pages)
    segment = Segment.create(pages, 0, incarnation, Path(directory))

    def fill(seed: int) -> None:
        for page in range(pages):
            segment.generations[page] += 1
            pool.pool[page].copy_(page_content(page, page_bytes, seed))
        torch.cuda.synchronize()

    fill(0)
    try:
        print(cuda_ipc_endpoint(pool, segment).SerializeToString().hex(), flush=True)
    except TransportError as error:
        print(f"error {error}", flush=True)
        return
    load: Load | None = None
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "refill":
            fill(int(rest[0]))
        elif command == "step":
            number, seed = map(int, rest)
            torch.cuda._sleep(STEP_CYCLES)
            for page in range(pages):
                pool.pool[page].copy_(page_content(page, page_bytes, seed))
            print("done", flush=True)
            torch.cuda.synchronize()
            segment.retire(number)
            continue
        elif command == "busy":
            load = Load()
            load.start()
        elif load is not None:
            assert load.stop() > 0
        print("done", flush=True)
    segment.close()


if __name__ == "__main__":
    main()
