"""Training a decoder from text files: config, data, loss, optimizer, checkpoints, metrics, loop."""
