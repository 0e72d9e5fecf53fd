"""Quantized weights: how checkpoints store them, one file a format, and products with them, one file a method.

A format (`fp8`, `gptq`, `awq`, `compressed`) turns what is stored into a `QuantizedTensor` (`quantized`). Where
a device has a method for it (`int8`, `int4`), its codes stay as they are in memory; otherwise it is dequantized
while loading and the layer is like any other.
"""
