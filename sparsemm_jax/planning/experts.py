"""From budgets to a mixture of experts: its widths, numbers and ranks.

The proportions are Kimi K3's: a latent of half the model's width, experts that
a token visits 48/7 as wide together, one shared expert for every eight visited,
77 times as wide as deep. What the budgets decide is the size and, by the ratio
of total to active parameters, how many experts there are to choose from.
"""

import dataclasses
import math

from sparsemm_jax import config as config_lib
from sparsemm_jax.planning import parameters

WIDTH_PER_LAYER = 77  # of K3: 7168 / 93
MOST_PER_TOKEN = 16  # experts; the finest that is published
LEAST_HIDDEN = 128  # of one expert: a tensor-core tile
MICRO_BATCH = 8192  # tokens of one device that are in flight together
STATE_BYTES = 12  # per parameter: itself, its gradient, its momentum, in fp32
TOLERANCE = 0.05  # of the budgets, within which a plan meets them
FEW_TOKENS = 150  # per expert and step, below which one step is too noisy
FIRST_OVERLOAD = 0.6  # of a rank before any balancing, 8 ranks; more if more


class PlanError(config_lib.ConfigError):
  """Budgets that no model can meet; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
  """What there is to spend."""

  total: float  # parameters of the language model
  active: float  # of them used by a token, without the embedding table
  memory_gib: float  # of one device
  bandwidth_gb: float  # of one device to all others, 1e9 bytes per second
  tokens_per_step: float  # per optimizer step, all devices together
  devices: int
  vocab_size: int = 163840

  def __post_init__(self):
    for name, value in vars(self).items():
      if not (math.isfinite(value) and value > 0):
        raise PlanError(f"{name}={value:g} must be positive")
    if self.total <= self.active:
      raise PlanError(
          f"total={self.total:.4g} is not above active={self.active:.4g}:"
          " without unused experts it is a dense model"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exchange:
  """One way to spread the experts over ranks, per layer and micro-batch."""

  ranks: int
  form: str  # gather | all_to_all
  tokens: int  # of one device
  rows: int  # that a rank computes, on average
  overload: float  # of the fullest rank over the average, expected
  token_bytes: float  # that a rank receives: dispatch and combine, forward
  weight_bytes: float  # that fsdp moves: forward, backward, gradients
  buffer_bytes: float  # of a rank's rows and its experts' whole matrices
  seconds: float  # on the wire, forward and backward


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertPlan:
  """A model and its ranks, with a reason for each choice."""

  budget: Budget
  model: config_lib.ModelConfig
  count: parameters.ParameterCount
  exchange: Exchange
  tokens_per_expert: float  # q, per optimizer step
  sampling_floor: float  # max violation that the best bias still shows
  router_share: float  # of the active parameters, which are FLOPs alike
  histogram_bytes: int  # per layer, all-reduced once a step

  def lines(self) -> list[tuple[str, str, str]]:
    """Returns (what, how much, why) for each choice."""
    return _lines(self)


def plan_experts(budget: Budget) -> ExpertPlan:
  """Plans the experts of a model that meets the budgets.

  Raises:
    PlanError: nothing does.
  """
  model = _model(budget)
  moe = model.moe
  count = parameters.count_parameters(model)
  per_expert = (
      budget.tokens_per_step * moe.num_experts_per_token / moe.num_experts
  )
  if per_expert < 1:
    least = math.ceil(moe.num_experts / moe.num_experts_per_token)
    raise PlanError(
        f"tokens_per_step={budget.tokens_per_step:g} gives each of"
        f" {moe.num_experts} experts {per_expert:.2g} tokens: at least"
        f" {least} tokens are needed for one each"
    )
  layers = model.num_layers - model.num_dense_layers
  router = layers * moe.num_experts * model.d_model
  if per_expert < FEW_TOKENS:
    moe = dataclasses.replace(moe, balancing="quantile_pooled")
  exchange = _exchange(budget, model, count)
  if exchange.ranks > 1:
    moe = dataclasses.replace(
        moe, exchange=exchange.form, row_budget=_head_room(exchange.overload)
    )
  else:
    moe = dataclasses.replace(moe, row_budget=None)
  return ExpertPlan(
      budget=budget,
      model=dataclasses.replace(model, moe=moe),
      count=count,
      exchange=exchange,
      tokens_per_expert=per_expert,
      sampling_floor=math.sqrt(2 * math.log(moe.num_experts) / per_expert),
      router_share=router / count.active,
      histogram_bytes=4 * moe.num_experts * moe.histogram_bins,
  )


_WIDTHS = (
    *range(128, 1024, 64), *range(1024, 8192, 256), *range(8192, 32769, 1024),
)  # fmt: skip


def _model(budget):
  """The model nearest to the active budget in K3's proportions."""
  candidates = []
  for width in _WIDTHS:
    model = _of_width(budget, width)
    if model is None:
      continue
    active = parameters.count_parameters(model).active
    shape = math.log(width / model.num_layers / WIDTH_PER_LAYER)
    error = math.log(active / budget.active)
    candidates.append((abs(shape) + 2 * abs(error), width, model))
  if budget.active < _least_active(budget):
    raise PlanError(
        f"active={budget.active:.4g} is too small: the output head over"
        f" vocab_size={budget.vocab_size} and two layers of the narrowest model"
        f" take {_least_active(budget):.4g}"
    )
  if not candidates:
    raise PlanError(
        f"active={budget.active:.4g} is out of range: models are planned from"
        f" {_WIDTHS[0]} to {_WIDTHS[-1]} wide"
    )
  _, _, model = min(candidates, key=lambda item: item[:2])
  count = parameters.count_parameters(model)
  moe = model.moe
  if moe.num_experts < 2 * moe.num_experts_per_token:
    raise PlanError(
        f"total={budget.total:.4g} holds {moe.num_experts} experts a layer, of"
        f" which active={budget.active:.4g} visits {moe.num_experts_per_token}:"
        " a choice needs twice as many"
    )
  for name, other in (("total", "active"), ("active", "total")):
    asked, actual = getattr(budget, name), getattr(count, name)
    if abs(actual / asked - 1) > TOLERANCE:
      raise PlanError(
          f"{name}={asked:.4g} cannot be met beside"
          f" {other}={getattr(budget, other):.4g}: the nearest model in K3's"
          f" proportions has {actual:.4g}"
      )
  return model


def _of_width(budget, width):
  """The model of this width that meets the budgets best, or None."""
  shape = _shape(budget, width)

  def size(what, layers, experts):
    count = parameters.count_parameters(shape(layers, experts))
    return getattr(count, what)

  # Both sizes grow by the same amount with each layer, or expert, but for the
  # router and the pattern of layers: a few are tried around the estimate.
  few, more = size("active", 5, 64), size("active", 9, 64)
  estimate = round(5 + 4 * (budget.active - few) / (more - few))
  if not 1 / 4 < width / WIDTH_PER_LAYER / max(estimate, 1) < 4:
    return None  # far too wide or too deep: no need to look closer
  models = []
  for layers in range(max(estimate - 1, 2), estimate + 2):
    one, two = size("total", layers, 1000), size("total", layers, 1001)
    experts = 1000 + (budget.total - one) / (two - one)
    models.append(shape(layers, _round(experts)))
  error = lambda model: abs(
      parameters.count_parameters(model).active - budget.active
  )
  return min(models, key=error, default=None)


def _shape(budget, width):
  """(layers, experts) -> model of this width in K3's proportions."""
  per_token = MOST_PER_TOKEN
  while per_token > 1 and 48 * width / (7 * per_token) < LEAST_HIDDEN:
    per_token //= 2
  hidden = _multiple(48 * width / (7 * per_token), 64)
  heads = max(round(96 * width / 7168), 1)

  def model(layers, experts):
    return config_lib.ModelConfig(
        vocab_size=budget.vocab_size,
        d_model=width,
        num_layers=layers,
        dense_hidden_dim=_multiple(33792 * width / 7168, 64),
        attn_res_block_size=12,
        kda=config_lib.KdaConfig(num_heads=heads, head_dim=128),
        mla=config_lib.MlaConfig(
            num_heads=heads,
            q_lora_rank=_multiple(1536 * width / 7168, 64),
            kv_lora_rank=_multiple(512 * width / 7168, 64),
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
        ),
        moe=config_lib.MoeConfig(
            num_experts=max(experts, per_token + 1),
            num_experts_per_token=per_token,
            latent_dim=width // 2,
            expert_hidden_dim=hidden,
            num_shared_experts=max(per_token // 8, 1),
        ),
    )

  return model


def _multiple(value, of):
  return max(round(value / of), 1) * of


def _round(experts):
  """A number of experts that many ranks divide, within 2 %; 0 if below 1."""
  for divisor in (128, 64, 32, 16, 8, 4, 2):
    near = round(experts / divisor) * divisor
    if near > 0 and abs(near / experts - 1) <= 0.02:
      return near
  return max(round(experts), 0)


def _least_active(budget):
  shape = _shape(budget, 128)
  return parameters.count_parameters(shape(2, 64)).active


def _exchange(budget, model, count):
  """The fewest ranks within a quarter of the least time on the wire."""
  gib = 2.0**30
  state = STATE_BYTES * count.total / budget.devices
  if state > budget.memory_gib * gib:
    least = math.ceil(STATE_BYTES * count.total / (budget.memory_gib * gib))
    raise PlanError(
        f"memory_gib={budget.memory_gib:g}: {count.total:.4g} parameters take"
        f" {state / gib:.0f} GiB on each of {budget.devices} devices"
        f" ({STATE_BYTES} bytes each, evenly spread); at least {least} devices"
        " are needed, before activations"
    )
  options = [
      _ranks(budget, model, ranks)
      for ranks in range(1, min(budget.devices, model.moe.num_experts) + 1)
      if budget.devices % ranks == 0 and model.moe.num_experts % ranks == 0
  ]
  free = budget.memory_gib * gib - state
  fitting = [option for option in options if option.buffer_bytes <= free]
  if not fitting:
    least = min(option.buffer_bytes for option in options)
    raise PlanError(
        f"memory_gib={budget.memory_gib:g}: {state / gib:.0f} GiB of state"
        f" leave {free / gib:.0f} GiB, and one layer's rows and experts take"
        f" {least / gib:.0f} GiB on the {options[-1].ranks} ranks that divide"
        f" both {budget.devices} devices and {model.moe.num_experts} experts"
    )
  best = min(option.seconds for option in fitting)
  return next(o for o in fitting if o.seconds <= 1.25 * best)


def _head_room(overload):
  """Rows over their mean: twice what chance adds, and 5 % for documents."""
  return round(1.05 + 2 * overload, 2)


def _ranks(budget, model, ranks):
  """What this many ranks cost."""
  moe = model.moe
  visits, latent = moe.num_experts_per_token, moe.latent_dim
  tokens = math.ceil(min(budget.tokens_per_step / budget.devices, MICRO_BATCH))
  rows = tokens * visits
  form = "gather" if ranks < visits else "all_to_all"
  if form == "gather":
    # z in bf16, indices and weights; what comes back is summed in fp32.
    there = (ranks - 1) * tokens * (2 * latent + 8 * visits)
    back = (ranks - 1) * tokens * 4 * latent
  else:
    there = back = rows * (ranks - 1) / ranks * 2 * latent
  matrices = 3 * latent * moe.expert_hidden_dim * moe.num_experts / ranks
  others = budget.devices / ranks
  # Gathered in bf16 forward and backward; gradients reduced in fp32.
  weights = matrices * (2 + 2 + 4) * (others - 1) / others
  overload = math.sqrt(2 * math.log(ranks) / rows)
  row_bytes = 2 * (2 * latent + 3 * moe.expert_hidden_dim)
  return Exchange(
      ranks=ranks,
      form=form,
      tokens=tokens,
      rows=rows,
      overload=overload,
      token_bytes=there + back,
      weight_bytes=weights,
      buffer_bytes=matrices * 6 + rows * _head_room(overload) * row_bytes,
      seconds=(2 * (there + back) + weights) / (budget.bandwidth_gb * 1e9),
  )


def _lines(plan):
  """Each choice of a plan and its reason."""
  model, moe, exchange = plan.model, plan.model.moe, plan.exchange
  budget, count = plan.budget, plan.count
  layers = model.num_layers - model.num_dense_layers
  steps = math.ceil(budget.tokens_per_step / budget.devices / exchange.tokens)
  per_token = moe.num_experts_per_token
  choices = f"{math.comb(moe.num_experts, per_token):.1e}"
  copies = min(exchange.ranks - 1, per_token * (1 - 1 / exchange.ranks))
  return [
      ("parameters", f"{count.total:.4g} total, {count.active:.4g} active",
       f"asked: {budget.total:.4g} and {budget.active:.4g}"),
      ("model", f"d_model {model.d_model}, {model.num_layers} layers",
       f"the active budget at {WIDTH_PER_LAYER} times as wide as deep; the"
       " first layer is dense"),
      ("experts per token", f"{per_token}",
       f"as fine as is published, while an expert stays {LEAST_HIDDEN} wide or"
       f" more; {choices} sets to choose from"),
      ("experts", f"{moe.num_experts}",
       f"what the total budget holds: {moe.num_experts / per_token:.3g} times"
       " those visited, rounded to what ranks divide"),
      ("latent width", f"{moe.latent_dim}",
       "half of d_model: halves the experts' FLOPs, weights and bytes sent"),
      ("expert width", f"{moe.expert_hidden_dim}",
       f"48/7 of d_model over {per_token} visits"),
      ("shared experts", f"{moe.num_shared_experts}",
       "one for every eight visited, of full width"),
      ("expert ranks",
       f"{exchange.ranks}" + (f" ({moe.exchange})" if moe.exchange else ""),
       f"the fewest within 25 % of the least time on the wire that divide"
       f" {budget.devices} devices and {moe.num_experts} experts;"
       f" {moe.num_experts // exchange.ranks} experts each, a token crosses"
       f" {copies:.3g} times"),
      ("rows per rank",
       f"{exchange.rows}, times row_budget {moe.row_budget or 1:g}",
       f"{exchange.tokens} tokens a device; once balanced the fullest rank has"
       f" {exchange.overload:.1%} more by chance; before that"
       f" {FIRST_OVERLOAD:.0%} or more, which take further passes"),
      ("dispatch and combine", f"{_bytes(exchange.token_bytes)} a layer",
       f"received by a rank, forward, per micro-batch ({steps} a step); fsdp"
       f" moves {_bytes(exchange.weight_bytes)} of weights beside"),
      ("time on the wire", f"{exchange.seconds * 1e3:.3g} ms a layer",
       f"forward and backward at {budget.bandwidth_gb:g} GB/s;"
       f" {exchange.seconds * layers * steps:.3g} s a step unless overlapped"),
      ("memory", f"{_bytes(STATE_BYTES * count.total / budget.devices)} state",
       f"{STATE_BYTES} bytes a parameter over {budget.devices} devices;"
       f" {_bytes(exchange.buffer_bytes)} for a layer's rows and experts"),
      ("max violation", f"{plan.sampling_floor:.3g}",
       f"sampling floor sqrt(2 ln E / q) at q = {plan.tokens_per_expert:.4g}"
       " tokens per expert and step"),
      ("balancing", moe.balancing,
       f"q is {'below' if plan.tokens_per_expert < FEW_TOKENS else 'above'}"
       f" {FEW_TOKENS}: the quantile of"
       f" {'many steps' if 'pooled' in moe.balancing else 'one step'}"),
      ("router", f"{plan.router_share:.2%} of the active FLOPs",
       f"{moe.num_experts} scores in fp32; histograms of"
       f" {_bytes(plan.histogram_bytes * layers)} are summed once a step"),
  ]  # fmt: skip


def _bytes(value):
  """1.5e9 -> '1.50 GB'."""
  for unit in ("B", "kB", "MB", "GB"):
    if value < 1000:
      return f"{value:.3g} {unit}"
    value /= 1000
  return f"{value:.3g} TB"
