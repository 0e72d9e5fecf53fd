"""Attention over the paged KV pool. `base` says what a backend is, `registry` finds one by name or picks the
best for a device; one module per backend. Import the modules; this package imports nothing."""
