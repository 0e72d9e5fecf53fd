"""A process that owns a segment: `python segment_owner.py DIRECTORY PAGES PAGE_BYTES INCARNATION`.

Prints the endpoint in hexadecimal; then obeys lines on stdin: "bump PAGE", "retire STEP", "close", and ends
with stdin.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from baton.transport.shm import Segment, segment_endpoint


def page_content(page: int, page_bytes: int) -> bytes:
    return np.random.default_rng(page).bytes(page_bytes)


def main() -> None:
    directory, pages, page_bytes, incarnation = sys.argv[1:]
    segment = Segment.create(int(pages), int(page_bytes), int(incarnation), Path(directory))
    for page in range(int(pages)):
        segment.pages[page * int(page_bytes) : (page + 1) * int(page_bytes)] = page_content(
            page, int(page_bytes)
        )
        segment.generations[page] = 2**63 + page
    print(segment_endpoint(segment).SerializeToString().hex(), flush=True)
    for line in sys.stdin:
        command, *rest = line.split()
        if command == "bump":
            segment.generations[int(rest[0])] += 1
        elif command == "retire":
            segment.retire(int(rest[0]))
        else:
            segment.close()
        print("done", flush=True)


if __name__ == "__main__":
    main()
