"""The train state, its steps, and what a run keeps on disk."""

from sparsemm_jax.training.loop import train
from sparsemm_jax.training.state import TrainState
from sparsemm_jax.training.state import init_state
from sparsemm_jax.training.step import make_eval_step
from sparsemm_jax.training.step import make_train_step

__all__ = [
    "TrainState",
    "init_state",
    "make_eval_step",
    "make_train_step",
    "train",
]
