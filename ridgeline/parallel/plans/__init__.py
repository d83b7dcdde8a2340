"""Which module of a model is split how over the tensor axis; one file a model family."""
