"""Arithmetic on configurations; no arrays."""

from sparsemm_jax.planning.parameters import count_parameters
from sparsemm_jax.planning.parameters import ParameterCount

__all__ = ["ParameterCount", "count_parameters"]
