"""W4A16: 16-bit activations times packed 4-bit weights."""
