"""Processes around a gateway whose cost is measured: a source of tokens, and clients."""
