"""Quantized weights: how checkpoints store them, one file a format, and products with them, one a method.

A format (`fp8`, `gptq`, `awq`, `compressed`) turns what is stored into a `QuantizedTensor` (`quantized`),
which is dequantized while it is loaded; the layer is then like any other.
"""
