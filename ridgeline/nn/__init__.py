"""The decoder, its checkpoints, tokenizer, cache and generation."""
