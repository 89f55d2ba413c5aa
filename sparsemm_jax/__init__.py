"""Sparse, natively multimodal, long-context models in JAX."""
