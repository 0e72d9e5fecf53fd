"""Kernels, most of them in Triton. Import the modules only where a GPU is in use: elsewhere their
dependencies may be missing."""
