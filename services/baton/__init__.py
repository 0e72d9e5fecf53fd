"""Baton: LLM serving with prefill and decode in separate gRPC processes."""

__version__ = "0.1.0"
