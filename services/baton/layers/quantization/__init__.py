"""Quantized weights: how checkpoints store them, one file a format, and how products with them are computed.

A format (`fp8`, `gptq`, `awq`, `compressed_tensors`) turns what is stored into a `QuantizedTensor`
(`quantized_tensor`). Where it stays so in memory (`weight_method`), a product is chosen for it (`cpu`); else
it is dequantized while loading, and the layer is like any other.
"""
