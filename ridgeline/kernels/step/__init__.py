"""The small operations between the matmuls of a decode step, fused."""
