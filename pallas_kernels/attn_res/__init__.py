"""Attention residuals: a softmax over depth mixes earlier layers' outputs."""

from pallas_kernels.attn_res.api import attn_res
from pallas_kernels.attn_res.api import attn_res_merge
from pallas_kernels.attn_res.api import attn_res_stats

__all__ = ["attn_res", "attn_res_merge", "attn_res_stats"]
