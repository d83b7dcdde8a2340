"""ridgeline: a decoder LLM from training to 4-bit serving at the hardware's limit.

`import ridgeline` touches no GPU and imports neither triton nor cutlass; kernels are imported when
chosen (core/registry.py).
"""

__version__ = "0.1.0"
