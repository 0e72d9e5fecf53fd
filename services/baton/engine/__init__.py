"""The engine. `scheduler` decides what each step computes (`scheduler_state`: queues and pages; `capacity`:
slots and reservations; `step_builder`: a step's rows; `plan`: the step as plain data). `model_runner`
executes it (`batch`: its rows as arrays, `step_graphs`, `chunk_graphs`: CUDA graphs), `sampler` chooses
tokens, `step_loop` is the thread that drives all of it. A role (prefill or decode) is a policy around this
engine, not a second engine. Import from the modules: the scheduler needs no torch."""
