"""Kimi Delta Attention with a bounded decay gate."""

from pallas_kernels.kda.api import chunk_kda
from pallas_kernels.kda.api import fused_kda
from pallas_kernels.kda.decode import recurrent_kda
from pallas_kernels.kda.gate import bounded_log_decay
from pallas_kernels.kda.gate import safe_lower_bound

__all__ = [
    "bounded_log_decay",
    "chunk_kda",
    "fused_kda",
    "recurrent_kda",
    "safe_lower_bound",
]
