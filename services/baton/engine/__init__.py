"""The engine: `scheduler` decides what each step computes (`admission`: who enters, `batch`: a step's rows,
`plan`: the step as plain data), `model_runner` executes it, `sampler` chooses tokens, `loop` is the thread
that drives it all. A role (prefill, decode) is a policy around this engine, not a second one. Import what
you need from the modules: the scheduler's side of it needs no torch."""
