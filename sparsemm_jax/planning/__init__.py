"""Arithmetic on configurations; no arrays."""

from sparsemm_jax.planning.experts import Budget
from sparsemm_jax.planning.experts import ExpertPlan
from sparsemm_jax.planning.experts import PlanError
from sparsemm_jax.planning.experts import plan_experts
from sparsemm_jax.planning.parameters import ParameterCount
from sparsemm_jax.planning.parameters import count_parameters

__all__ = [
    "Budget",
    "ExpertPlan",
    "ParameterCount",
    "PlanError",
    "count_parameters",
    "plan_experts",
]
