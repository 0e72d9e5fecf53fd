"""The engine. `scheduler` decides what each step computes (`batch`: a step's rows, `plan`: the step as
plain data), `model_runner` executes it, `sampler` chooses tokens, `loop` is the thread that drives all of
it. A role (prefill, decode) is a policy around this engine, not a second engine. Import from the modules:
the scheduler needs no torch."""
