"""The serial Hopper kernels alone, in the interpreter, on made-up tiles."""

from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
import numpy as np

from pallas_kernels.kda import mosaic_gpu_prep as prep_lib
from pallas_kernels.kda import mosaic_gpu_scan
from pallas_kernels.kda import mosaic_gpu_walk
from tests import testing
from tests.pallas_kernels import races

CHUNKS = 5  # more than the ring of loads holds
NAMES = ("nkgam", "qg", "kg", "aqk", "solve", "gam", "scales", "kg_low")


def _tiles(values, masked):
  rng = np.random.default_rng(0)
  lead, tokens = (1, 1, CHUNKS), 64 * CHUNKS

  def noise(*shape, scale=1.0):
    return jnp.asarray(scale * rng.uniform(-1, 1, shape), jnp.float32)

  k = noise(*lead, 64, 64, scale=0.2)
  tiles = dict(
      nkgam=-k,
      qg=noise(*lead, 64, 64, scale=0.2),
      kg=k,
      # Far more than it lacks, so that it shows.
      kg_low=noise(*lead, 64, 64, scale=0.1),
      aqk=jnp.tril(noise(*lead, 64, 64, scale=0.2)),
      solve=jnp.tril(noise(*lead, 64, 64, scale=0.1), -1),
  )
  tiles = {name: x.astype(jnp.bfloat16) for name, x in tiles.items()}
  gam = 0.3 + noise(*lead, 64, scale=0.2)
  beta, inverse = 0.5 + noise(*lead, 64, scale=0.4), 1.5 + noise(*lead, 64)
  x = noise(1, tokens, 1, values).astype(jnp.bfloat16)
  if masked:
    gam = gam.at[:, :, 2].set(0.0)
    beta = beta.at[:, :, -1, 40:].set(0.0)
    x = x.at[:, tokens - 24 :].set(jnp.nan)
  tiles |= dict(gam=gam, scales=jnp.stack([beta, inverse], axis=3))
  return tiles, x, noise(1, 1, values, 64)


def _float64(tiles, x, state):
  tiles = {name: np.asarray(t, np.float64)[0, 0] for name, t in tiles.items()}
  x = np.asarray(x, np.float64)[0, :, 0].reshape(CHUNKS, 64, -1)
  return tiles, np.nan_to_num(x), np.asarray(state, np.float64)[0, 0].T


def _forward(tiles, v, state, with_low):
  """out, v' and states before each chunk by the module's formulas."""
  out, states, v_new = [], [], []
  for n in range(CHUNKS):
    nkgam, qg, kg, aqk, solve, gam, scales, low = (tiles[i][n] for i in NAMES)
    states.append(state)
    rest = scales[0][:, None] * (v[n] * scales[1][:, None] + nkgam @ state)
    v_new.append(rest + solve @ rest)
    out.append(qg @ state + aqk @ v_new[-1])
    kg = kg + low if with_low else kg
    state = gam[:, None] * state + kg.T @ v_new[-1]
  return np.concatenate(out), state, np.stack(v_new), np.stack(states)


def _reverse(tiles, do, state):
  dv, states = [], []
  for n in reversed(range(CHUNKS)):
    nkgam, qg, kg, aqk, solve, gam, scales, _ = (tiles[i][n] for i in NAMES)
    states.insert(0, state)
    dv_new = aqk.T @ do[n] + kg @ state
    dr = scales[0][:, None] * (dv_new + solve.T @ dv_new)
    dv.insert(0, dr * scales[1][:, None])
    state = gam[:, None] * state + qg.T @ do[n] + nkgam.T @ dr
  return np.concatenate(dv), np.stack(states), state


def _plan(masked, **interpret):
  return prep_lib.Plan(
      raw=True,
      scale=1.0,
      lower_bound=-5.0,
      masked=masked,
      pairs=1,
      interpret=plgpu.InterpretGPUParams(**interpret),
  )


class MosaicGpuScanTest(parameterized.TestCase):

  @parameterized.named_parameters(
      ("a_block_per_slice", 128, False, True),
      ("a_block_per_head", 128, True, False),
  )
  def test_many_chunks_match_the_formulas(self, values, masked, few):
    tiles, x, state = _tiles(values, masked)
    exact = _float64(tiles, x, state)
    plan, tiles = _plan(masked), tuple(tiles[name] for name in NAMES)
    check = lambda a, b, what: testing.assert_close(a, b, "bf16", what)
    out, final, *_ = _forward(*exact, with_low=False)
    *_, v_new, states = _forward(*exact, with_low=True)
    heads = mosaic_gpu_walk._FEW_HEADS if few else 0
    with mock.patch.object(mosaic_gpu_walk, "_FEW_HEADS", heads):
      got = mosaic_gpu_scan.scan(plan, tiles, x, state, output=True)
      check(got[0][0, :, 0], out, "output")
      check(got[1][0, 0].T, final, "final state")
      got = mosaic_gpu_scan.scan(plan, tiles, x, state, output=False)
      check(got[0][0, 0].swapaxes(1, 2), states, "states")
      got = np.asarray(got[1], np.float64)[0, 0].sum(axis=1)
      check(got, v_new, "v'")
      got = mosaic_gpu_scan.reverse_scan(plan, tiles, x, state)
      dv, states, initial = _reverse(*exact)
      check(got[0][0, :, 0], dv, "dv")
      check(got[1][0, 0].swapaxes(1, 2), states, "dS")
      check(got[2][0, 0].T, initial, "gradient of the initial state")

  def test_the_next_chunk_does_not_race_with_this_one(self):
    tiles, x, state = _tiles(64, False)
    plan = _plan(False, detect_races=True)
    tiles = tuple(tiles[name] for name in NAMES)
    with races.none_found():
      got = mosaic_gpu_scan.scan(plan, tiles, x, state, output=True)
      jax.block_until_ready(got)
      got = mosaic_gpu_scan.backward_scans(plan, tiles, x, state, x, state)
      jax.block_until_ready(got)

  def test_side_by_side_the_backward_scans_give_the_same_bits(self):
    tiles, x, state = _tiles(128, True)
    plan, tiles = _plan(True), tuple(tiles[name] for name in NAMES)
    forward, reverse = (tiles, x, state), (tiles, 0.5 * x, -state)
    wanted = (
        mosaic_gpu_scan.scan(plan, *forward, output=False),
        mosaic_gpu_scan.reverse_scan(plan, *reverse),
    )
    calls = []

    def walk(*args, **kwargs):
      calls.append(kwargs["name"])
      return real(*args, **kwargs)

    real = mosaic_gpu_walk.walk
    with mock.patch.object(mosaic_gpu_walk, "walk", walk):
      got = mosaic_gpu_scan.backward_scans(plan, *forward, *reverse[1:])
    self.assertEqual(calls, ["kda_backward_scans"])
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
      np.testing.assert_array_equal(a, b)


if __name__ == "__main__":
  absltest.main()
