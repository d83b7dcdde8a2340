"""On-disk forms of quantized weights, one class a format."""
