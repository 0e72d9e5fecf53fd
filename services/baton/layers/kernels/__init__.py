"""Kernels in Triton. Import the modules only where a GPU is in use: elsewhere Triton may be missing."""
