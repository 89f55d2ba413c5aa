"""The model and its parts."""

from sparsemm_jax.models.multimodal import ModelOutput
from sparsemm_jax.models.multimodal import SparseMultimodalModel
from sparsemm_jax.models.multimodal import check_image_tokens

__all__ = ["ModelOutput", "SparseMultimodalModel", "check_image_tokens"]
