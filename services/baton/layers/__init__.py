"""Layers of decoders: modules that declare their tensors by the checkpoint's names and compute.
`quantization/` keeps matrices quantized in memory, `kernels/` has the GPU's kernels. Import the modules;
this package imports nothing."""
