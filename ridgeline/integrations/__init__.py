"""Drop-in places: Hugging Face Transformers and torch's scaled_dot_product_attention.

Import the module you need (ridgeline.integrations.transformers, .sdpa, .kernel_package); this file
imports neither.
"""
