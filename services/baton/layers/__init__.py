"""Building blocks of decoders: functions of tensors, without state."""
