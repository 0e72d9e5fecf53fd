"""What `baton bench` measures with: `workload` (requests and arrival times), `load_client` and
`load_processes` (the processes that send them and note when tokens come), `summary` and `plots`;
`engine_bench`, `steps`, `profile` (the engine inside this process); `kv_transfer` (KV pages from another
process). Nothing here is of cli."""
