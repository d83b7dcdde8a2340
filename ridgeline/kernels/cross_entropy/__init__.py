"""Cross-entropy of a chunk of logits: what its loss needs, and logits made their gradient."""
