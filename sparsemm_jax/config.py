"""Every setting of a run, as frozen dataclasses that check themselves.

A config file returns `to_config_dict(RunConfig(...))`, so that flags such as
`--config.optim.learning_rate=1e-3` can change any field; `from_config_dict`
turns the result back into checked dataclasses. Every message names the field.
"""

import dataclasses
import difflib
import types
import typing
from typing import Any

import ml_collections
from ml_collections import config_dict

from pallas_kernels import kda

DTYPES = ("float32", "bfloat16", "float16")
BALANCING = (
    "quantile", "quantile_pooled", "sequence_quantile", "sign", "switch_loss",
    "none",
)  # fmt: skip
EXCHANGES = (None, "gather", "all_to_all")
KDA_IMPLEMENTATIONS = (None, "mosaic_gpu", "mosaic_tpu", "chunked", "reference")
ATTN_RES_IMPLEMENTATIONS = (None, "mosaic_gpu", "mosaic_tpu", "reference")
GROUPED_MATMUL_IMPLEMENTATIONS = (
    None,
    "mosaic_gpu",
    "ragged_dot",
    "xla",
    "reference",
)
REMAT = ("none", "dots", "full")
SOURCE_KINDS = ("digits", "python_text", "text", "jsonl", "array_record")
TOKENIZERS = ("byte", "tokenizers", "sentencepiece")


class ConfigError(ValueError):
  """A setting that cannot be; the message names the field."""


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(message)


def _require_positive(config: Any, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    _require(
        value is None or value > 0,
        f"{type(config).__name__}.{name} must be positive, got {value}",
    )


def _require_choice(
    config: Any, name: str, choices: tuple[str | None, ...]
) -> None:
  value = getattr(config, name)
  _require(
      value in choices,
      f"{type(config).__name__}.{name} must be one of"
      f" {', '.join(map(str, choices))}; got {value!r}",
  )


@dataclasses.dataclass(frozen=True, kw_only=True)
class KdaConfig:
  """Kimi Delta Attention with a lower-bounded log decay."""

  num_heads: int = 4  # query and key heads, H
  num_value_heads: int | None = None  # HV, a multiple of H; None: H
  head_dim: int = 32  # key width K
  value_head_dim: int | None = None  # V; None: K
  conv_kernel_size: int = 4  # causal depthwise convolution, tokens
  decay_rank: int | None = None  # width of the decay bottleneck; None: K
  lower_bound: float = -5.0  # nats per token, of the log decay
  implementation: str | None = None  # of pallas_kernels.kda; None: best

  def __post_init__(self):
    _require_positive(
        self, "num_heads", "num_value_heads", "head_dim", "value_head_dim",
        "conv_kernel_size", "decay_rank",
    )  # fmt: skip
    _require(
        self.value_heads % self.num_heads == 0,
        f"KdaConfig.num_value_heads={self.num_value_heads} is not a multiple"
        f" of num_heads={self.num_heads}",
    )
    _require_choice(self, "implementation", KDA_IMPLEMENTATIONS)
    lowest = kda.safe_lower_bound("bfloat16")  # and in the wider dtypes
    _require(
        lowest < self.lower_bound < 0,
        f"KdaConfig.lower_bound={self.lower_bound} is not in ({lowest:.4f}, 0)",
    )

  @property
  def value_heads(self) -> int:
    return self.num_value_heads or self.num_heads

  @property
  def value_dim(self) -> int:
    return self.value_head_dim or self.head_dim

  @property
  def rank(self) -> int:
    return self.decay_rank or self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlaConfig:
  """Gated multi-head latent attention; published field names."""

  num_heads: int = 4
  q_lora_rank: int = 64  # query bottleneck
  kv_lora_rank: int = 32  # the cached latent
  qk_nope_head_dim: int = 32  # per-head key part
  qk_rope_head_dim: int = 16  # key part shared by all heads
  v_head_dim: int = 32
  rope_theta: float | None = None  # None: no positions (NoPE)

  def __post_init__(self):
    _require_positive(
        self, "num_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim",
        "qk_rope_head_dim", "v_head_dim", "rope_theta",
    )  # fmt: skip
    _require(
        self.rope_theta is None or self.qk_rope_head_dim % 2 == 0,
        f"MlaConfig.qk_rope_head_dim={self.qk_rope_head_dim} must be even when"
        " rope_theta is set",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoeConfig:
  """Latent mixture of experts and its balancing rule."""

  num_experts: int = 16  # E
  num_experts_per_token: int = 2  # A
  latent_dim: int = 64  # L, the width experts work in
  expert_hidden_dim: int = 64
  num_shared_experts: int = 1  # full-width experts every token uses
  # quantile | quantile_pooled (over steps: for small batches) |
  # sequence_quantile (and inside each document; cannot decode with a cache) |
  # sign | switch_loss | none
  balancing: str = "quantile"
  histogram_bins: int = 1000  # of the margins (the three quantile rules)
  pool_decay: float = 0.95  # per optimizer step (quantile_pooled)
  sequence_weight: float = 0.3  # of the price; 1 costs loss (sequence_quantile)
  sequence_decay: float = 0.99  # per token (sequence_quantile)
  sequence_bins: int = 100  # of the scores (sequence_quantile)
  sign_step_size: float = 1e-3  # bias step (sign)
  switch_loss_weight: float = 1e-2  # (switch_loss)
  freeze_step: int | None = None  # optimizer steps after which biases stay
  implementation: str | None = None  # of grouped_matmul; None: best
  # Between expert ranks, gather | all_to_all; None: gather if they are fewer
  # than num_experts_per_token.
  exchange: str | None = None
  # Rows a rank computes at a time, over the mean; None: whatever may come. At
  # 896 experts and 32,768 tokens 1.05 is enough once balanced, 1.6 at the
  # start; the metric router/rank_violation measures what is needed.
  row_budget: float | None = 1.25
  drop_overflow: bool = False  # counted in router/dropped; else more passes

  def __post_init__(self):
    _require_positive(
        self, "num_experts", "num_experts_per_token", "latent_dim",
        "expert_hidden_dim", "histogram_bins", "sequence_bins",
        "sign_step_size", "freeze_step", "row_budget",
    )  # fmt: skip
    _require(
        self.num_shared_experts >= 0,
        f"MoeConfig.num_shared_experts={self.num_shared_experts} is negative",
    )
    _require(
        self.num_experts_per_token < self.num_experts,
        f"MoeConfig.num_experts_per_token={self.num_experts_per_token} must be"
        f" below num_experts={self.num_experts}",
    )
    _require_choice(self, "balancing", BALANCING)
    for name in ("pool_decay", "sequence_weight", "sequence_decay"):
      value = getattr(self, name)
      _require(0.0 <= value <= 1.0, f"MoeConfig.{name}={value} not in [0, 1]")
    _require_choice(self, "implementation", GROUPED_MATMUL_IMPLEMENTATIONS)
    _require_choice(self, "exchange", EXCHANGES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionConfig:
  """Native-resolution vision tower, 2x2 merge and projector."""

  patch_size: int = 14  # pixels
  merge_size: int = 2  # patches per token and side
  d_model: int = 64
  num_layers: int = 2
  num_heads: int = 2
  head_dim: int = 32  # a multiple of 4 (2D RoPE)
  mlp_hidden_dim: int = 128
  position_table_size: int = 16  # learned table is size x size
  rope_theta: float = 10000.0
  max_patches_per_image: int = 65536  # larger images are scaled down
  max_patches_per_side: int = 512
  media_pad_id: int = 258  # the token each image token replaces

  def __post_init__(self):
    _require_positive(
        self, "patch_size", "merge_size", "d_model", "num_layers", "num_heads",
        "head_dim", "mlp_hidden_dim", "position_table_size", "rope_theta",
        "max_patches_per_image", "max_patches_per_side",
    )  # fmt: skip
    _require(
        self.head_dim % 4 == 0,
        f"VisionConfig.head_dim={self.head_dim} must be a multiple of 4",
    )

  @property
  def patch_dim(self) -> int:
    return 3 * self.patch_size**2

  @property
  def patches_per_token(self) -> int:
    return self.merge_size**2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
  """How a mesh with stages runs the decoder; without stages it says nothing."""

  virtual_stages: int = 1  # chunks of blocks on each device along `stage`
  micro_batches: int | None = None  # per forward pass; None: one a stage
  # Transformer blocks of each chunk, chunk c on device c mod stages; None: as
  # even as can be, the longer chunks first.
  layers_per_chunk: tuple[int, ...] | None = None

  def __post_init__(self):
    _require_positive(self, "virtual_stages", "micro_batches")
    _require(
        all(size > 0 for size in self.layers_per_chunk or ()),
        f"PipelineConfig.layers_per_chunk={self.layers_per_chunk} has an empty"
        " chunk",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A sparse multimodal decoder."""

  vocab_size: int = 264
  d_model: int = 128  # D
  num_layers: int = 4  # Transformer blocks
  num_dense_layers: int = 1  # leading blocks with a dense MLP
  mla_every: int = 4  # block i (from 1) is MLA if i % mla_every == 0
  last_is_mla: bool = True  # and the last block is MLA in any case
  dense_hidden_dim: int = 256
  gate_cap: float = 4.0  # SiTU-GLU
  up_cap: float | None = 25.0  # SiTU-GLU; None: not capped
  attn_res_block_size: int | None = 2  # Transformer blocks; None: ordinary
  attn_res_implementation: str | None = None  # of attn_res; None: best
  norm_eps: float = 1e-5
  init_std: float = 0.02
  dtype: str = "float32"  # compute
  param_dtype: str = "float32"
  scan_layers: bool = True  # one compiled body per repeating pattern
  remat: str = "none"  # none | dots (keep matmuls) | full (keep block inputs)
  kda: KdaConfig = KdaConfig()
  mla: MlaConfig = MlaConfig()
  moe: MoeConfig = MoeConfig()
  vision: VisionConfig | None = None
  pipeline: PipelineConfig = PipelineConfig()

  def __post_init__(self):
    _require_positive(
        self, "vocab_size", "d_model", "num_layers", "mla_every",
        "dense_hidden_dim", "gate_cap", "up_cap", "attn_res_block_size",
        "norm_eps", "init_std",
    )  # fmt: skip
    _require(
        0 <= self.num_dense_layers <= self.num_layers,
        f"ModelConfig.num_dense_layers={self.num_dense_layers} must be between"
        f" 0 and num_layers={self.num_layers}",
    )
    _require_choice(self, "attn_res_implementation", ATTN_RES_IMPLEMENTATIONS)
    _require_choice(self, "dtype", DTYPES)
    _require_choice(self, "param_dtype", DTYPES)
    _require_choice(self, "remat", REMAT)
    _require(
        self.vision is None or self.vision.media_pad_id < self.vocab_size,
        "VisionConfig.media_pad_id must be below"
        f" ModelConfig.vocab_size={self.vocab_size}",
    )

  def is_mla(self, layer: int) -> bool:
    """Whether Transformer block `layer` (from 0) attends by MLA."""
    last = self.last_is_mla and layer == self.num_layers - 1
    return last or (layer + 1) % self.mla_every == 0

  def is_moe(self, layer: int) -> bool:
    """Whether Transformer block `layer` (from 0) has experts."""
    return layer >= self.num_dense_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
  """Text to ids."""

  kind: str = "byte"  # byte | tokenizers | sentencepiece
  path: str | None = None  # tokenizer.json or a SentencePiece .model file

  def __post_init__(self):
    _require_choice(self, "kind", TOKENIZERS)
    _require(
        (self.kind == "byte") == (self.path is None),
        "TokenizerConfig.path must be set for kind 'tokenizers' and"
        f" 'sentencepiece' and only there (kind {self.kind!r}, path"
        f" {self.path!r})",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
  """One source of documents."""

  kind: str = "python_text"  # digits|python_text|text|jsonl|array_record
  path: str | None = None  # a file or glob; not for digits and python_text
  eval_path: str | None = None  # held-out files; None: split by document
  eval_fraction: float = 0.05  # share of documents held out by that split

  def __post_init__(self):
    _require_choice(self, "kind", SOURCE_KINDS)
    embedded = self.kind in ("digits", "python_text")
    _require(
        embedded == (self.path is None),
        f"SourceConfig.path must {'not ' if embedded else ''}be set for kind"
        f" {self.kind!r}",
    )
    _require(
        0.0 < self.eval_fraction < 1.0,
        f"SourceConfig.eval_fraction={self.eval_fraction} is not in (0, 1)",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
  """Where documents come from."""

  tokenizer: TokenizerConfig = TokenizerConfig()
  sources: dict[str, SourceConfig] = dataclasses.field(
      default_factory=lambda: {
          "digits": SourceConfig(kind="digits", eval_fraction=0.2),
          "python": SourceConfig(kind="python_text"),
      }
  )
  seed: int = 0

  def __post_init__(self):
    _require(bool(self.sources), "DataConfig.sources is empty")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageConfig:
  """One stretch of training at one sequence length."""

  seq_len: int = 256  # tokens per row
  batch_size: int = 8  # rows per optimizer step, all micro-batches together
  steps: int | None = None  # optimizer steps; exactly one of steps, tokens
  tokens: int | None = None  # rounded up to whole steps
  micro_batches: int = 1  # gradient accumulation
  max_patches: int = 0  # image patches per row; 0: no images in this stage
  mixture: dict[str, float] = dataclasses.field(
      default_factory=lambda: {"python": 1.0}
  )  # source name -> weight, of packed rows

  def __post_init__(self):
    _require_positive(
        self, "seq_len", "batch_size", "steps", "tokens", "micro_batches"
    )
    _require(
        (self.steps is None) != (self.tokens is None),
        "StageConfig: set exactly one of steps and tokens, got"
        f" steps={self.steps}, tokens={self.tokens}",
    )
    _require(
        self.batch_size % self.micro_batches == 0,
        f"StageConfig.batch_size={self.batch_size} is not a multiple of"
        f" micro_batches={self.micro_batches}",
    )
    _require(
        self.max_patches >= 0,
        f"StageConfig.max_patches={self.max_patches} is negative",
    )
    _require(
        bool(self.mixture) and all(w > 0 for w in self.mixture.values()),
        f"StageConfig.mixture needs positive weights, got {self.mixture}",
    )

  @property
  def num_steps(self) -> int:
    """Optimizer steps of the stage."""
    if self.steps is not None:
      return self.steps
    return -(-self.tokens // (self.seq_len * self.batch_size))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
  """Muon for matrices, AdamW for the rest, one schedule."""

  learning_rate: float = 3e-3  # peak, of Muon matrices and AdamW alike
  final_learning_rate_fraction: float = 0.1
  warmup_fraction: float = 0.01  # of all steps of all stages
  weight_decay: float = 0.1
  muon: bool = True  # False: AdamW for everything
  muon_momentum: float = 0.95
  adam_b1: float = 0.9
  adam_b2: float = 0.95
  adam_eps: float = 1e-8
  clip_norm: float = 1.0  # of the global gradient
  qk_clip_threshold: float | None = 100.0  # MLA logits; None: off

  def __post_init__(self):
    _require_positive(
        self, "learning_rate", "adam_eps", "clip_norm", "qk_clip_threshold"
    )
    for name in (
        "final_learning_rate_fraction", "warmup_fraction", "muon_momentum",
        "adam_b1", "adam_b2",
    ):  # fmt: skip
      value = getattr(self, name)
      _require(0.0 <= value <= 1.0, f"OptimConfig.{name}={value} not in [0, 1]")
    _require(
        self.weight_decay >= 0,
        f"OptimConfig.weight_decay={self.weight_decay} is negative",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
  """Devices along each axis; -1 for at most one axis takes what is left."""

  data: int = -1
  fsdp: int = 1
  expert: int = 1
  context: int = 1
  tensor: int = 1
  stage: int = 1

  def __post_init__(self):
    sizes = dataclasses.asdict(self)
    for name, size in sizes.items():
      _require(
          size > 0 or size == -1,
          f"MeshConfig.{name}={size} must be positive or -1",
      )
    _require(
        list(sizes.values()).count(-1) <= 1,
        f"MeshConfig: more than one axis is -1 in {sizes}",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """The loop."""

  stages: tuple[StageConfig, ...] = (StageConfig(steps=100),)
  seed: int = 0
  z_loss_weight: float = 0.0
  max_nonfinite_in_a_row: int = 10  # skipped steps that stop the run
  log_every: int = 10  # steps
  eval_every: int | None = None  # steps; None: only at the end
  eval_batches: int = 8
  checkpoint_every: int = 100  # steps
  keep_latest: int = 2  # checkpoints
  keep_every: int | None = None  # steps; these are never deleted
  init_checkpoint: str | None = None  # a run to start from, parameters only

  def __post_init__(self):
    _require(bool(self.stages), "TrainConfig.stages is empty")
    _require_positive(
        self, "max_nonfinite_in_a_row", "log_every", "eval_every",
        "eval_batches", "checkpoint_every", "keep_latest", "keep_every",
    )  # fmt: skip
    _require(
        self.z_loss_weight >= 0,
        f"TrainConfig.z_loss_weight={self.z_loss_weight} is negative",
    )

  @property
  def num_steps(self) -> int:
    """Optimizer steps of all stages."""
    return sum(stage.num_steps for stage in self.stages)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
  """A whole run."""

  model: ModelConfig = ModelConfig()
  data: DataConfig = DataConfig()
  optim: OptimConfig = OptimConfig()
  train: TrainConfig = TrainConfig()
  mesh: MeshConfig = MeshConfig()

  def __post_init__(self):
    for index, stage in enumerate(self.train.stages):
      where = f"train.stages[{index}]"
      unknown = sorted(set(stage.mixture) - set(self.data.sources))
      _require(
          not unknown,
          f"{where}.mixture names unknown sources {unknown}; data.sources has"
          f" {sorted(self.data.sources)}",
      )
      vision = self.model.vision
      _require(
          not stage.max_patches or vision is not None,
          f"{where}.max_patches={stage.max_patches} but model.vision is None",
      )
      _require(
          not vision or stage.max_patches % vision.patches_per_token == 0,
          f"{where}.max_patches={stage.max_patches} is not a multiple of"
          " model.vision.merge_size ** 2",
      )


def to_config_dict(config: Any) -> ml_collections.ConfigDict:
  """Turns a config dataclass into a locked ConfigDict, fields overridable.

  Args:
    config: a dataclass of this file.

  Returns:
    The same tree; a field whose type allows None is a typed placeholder, so
    that a flag may set it either way.
  """
  result = ml_collections.ConfigDict()
  hints = typing.get_type_hints(type(config))
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    if value is None:
      kinds = [k for k in typing.get_args(hints[field.name]) if k in _SCALARS]
      value = config_dict.placeholder(kinds[0]) if kinds else None
    result[field.name] = _plain(value)
  return result.lock()


_SCALARS = (int, float, str, bool)


def _plain(value: Any) -> Any:
  if dataclasses.is_dataclass(value):
    return to_config_dict(value)
  if isinstance(value, dict):
    return ml_collections.ConfigDict(
        {key: _plain(item) for key, item in value.items()}
    )
  if isinstance(value, tuple):
    return tuple(_plain(item) for item in value)
  return value


def from_config_dict(
    values: Any, kind: type = RunConfig, path: str = "config"
) -> Any:
  """Builds a checked dataclass from a ConfigDict or nested dict.

  Args:
    values: the tree `to_config_dict` made, perhaps changed by flags.
    kind: the dataclass to build.
    path: the name of `values`, for messages.

  Returns:
    An instance of `kind`.

  Raises:
    ConfigError: an unknown field, a value of another type, or one the
      dataclass refuses; the message starts with the path of the field.
  """
  hints = typing.get_type_hints(kind)
  for name in values:
    if name not in hints:
      near = difflib.get_close_matches(name, hints, 1)
      hint = f"; did you mean {near[0]!r}?" if near else ""
      raise ConfigError(
          f"{path}.{name}: unknown field of {kind.__name__}{hint}"
      )
  arguments = {
      name: _typed(values[name], hints[name], f"{path}.{name}")
      for name in values
  }
  try:
    return kind(**arguments)
  except ConfigError as error:
    raise ConfigError(f"{path}: {error}") from None


def _typed(value: Any, hint: Any, path: str) -> Any:
  if isinstance(hint, types.UnionType):
    options = typing.get_args(hint)
    if value is None and types.NoneType in options:
      return None
    (hint,) = [option for option in options if option is not types.NoneType]
  if dataclasses.is_dataclass(hint):
    if value is None or isinstance(value, _SCALARS):
      raise ConfigError(f"{path}: expected fields, got {value!r}")
    return from_config_dict(value, hint, path)
  origin = typing.get_origin(hint)
  if origin is dict:
    item = typing.get_args(hint)[1]
    return {key: _typed(value[key], item, f"{path}.{key}") for key in value}
  if origin is tuple:
    item = typing.get_args(hint)[0]
    return tuple(
        _typed(v, item, f"{path}[{index}]") for index, v in enumerate(value)
    )
  if hint is float and type(value) is int:
    return float(value)
  if type(value) is not hint:
    raise ConfigError(
        f"{path}: expected {hint.__name__}, got {value!r}"
        f" ({type(value).__name__})"
    )
  return value


def to_dict(config: Any) -> dict[str, Any]:
  """Returns the config as plain nested dicts and lists, for JSON."""
  return dataclasses.asdict(config)
