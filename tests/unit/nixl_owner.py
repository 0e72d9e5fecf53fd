"""A process that owns a pool registered with NIXL: `python nixl_owner.py PAGES PAGE_BYTES`.

Prints "endpoint " and the endpoint in hexadecimal; ends with stdin.
"""

from __future__ import annotations

import sys

from segment_owner import page_content

from baton.transport import HostPages
from baton.transport.nixl import NixlOwner


def main() -> None:
    pages, page_bytes = map(int, sys.argv[1:])
    memory = bytearray(b"".join(page_content(page, page_bytes) for page in range(pages)))
    owner = NixlOwner(HostPages(memoryview(memory), page_bytes))
    print("endpoint", owner.endpoint.SerializeToString().hex(), flush=True)
    sys.stdin.read()
    owner.close()


if __name__ == "__main__":
    main()
