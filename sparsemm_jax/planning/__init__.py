"""Arithmetic on configurations; no arrays."""

from sparsemm_jax.planning.parameters import ParameterCount
from sparsemm_jax.planning.parameters import count_parameters

__all__ = ["ParameterCount", "count_parameters"]
