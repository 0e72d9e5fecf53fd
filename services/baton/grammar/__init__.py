"""Constrained decoding: `base` is the interface, `llguidance` the library behind it, `compiler` compiles
grammars in threads and caches them, `trials` has each tried first in a process that may die. Knows neither
gRPC nor the engine; engine.grammar_masks applies what it yields."""
