"""Attention over the paged KV pool. `base` defines a backend, `registry` finds one by name or chooses the
best for a device; one module per backend. Import the modules; this package imports nothing."""
