"""Training over data, tensor, pipeline and context parallel ranks, equal to one process."""
