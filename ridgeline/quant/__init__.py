"""Quantization: the algorithms (rtn, gptq), calibration over a model, the quantized layer,
checkpoints."""
