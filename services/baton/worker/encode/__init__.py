"""The encode node: a vision tower in a process of its own. `batches` encodes images of all callers together,
`server` serves them."""
