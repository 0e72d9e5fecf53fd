"""Pieces that decoders are made of: functions of tensors, without state."""
