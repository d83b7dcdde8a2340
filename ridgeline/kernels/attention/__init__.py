"""Attention: FlashAttention's functions, several implementations behind one meaning."""
