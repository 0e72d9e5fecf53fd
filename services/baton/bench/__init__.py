"""What `baton bench` measures with: `workload` (requests and arrival times), `client` and `clients` (the
processes that send them and note when tokens come), `summary` and `plots`; `engine`, `steps`, `profile` (the
engine inside this process); `transfer` (KV pages from another process). Nothing here is of cli."""
