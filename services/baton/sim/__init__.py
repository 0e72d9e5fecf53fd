"""The deterministic simulator: the real core of all processes under one seeded scheduler and a virtual clock,
over a simulated network, with a simulated model. `world` is the scheduler; `network` and `transport` carry;
`model` has pools of real bytes and the model; `process`, `prefill`, `decode`, `encode` and `gateway` are the
shells; `event_loop` and `calls` run what is written for asyncio and grpc.aio.
`scenario` and `faults` draw what happens from a seed, `cluster` and `run` run it, `checks` and the shells
check it, `shrink` makes it small, `bugs` show what it finds, by `planting`. After FoundationDB (Zhou et al.,
2021)."""
