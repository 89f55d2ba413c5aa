"""Documents and positions of packed rows."""

from absl.testing import absltest
import jax.numpy as jnp
import numpy as np

from sparsemm_jax.layers import layout as layout_lib


class LayoutTest(absltest.TestCase):

  def test_runs_are_documents_and_padding_inside_one_is_skipped(self):
    ids = [
        [5, 5, 2, 2, 2, 5, 0, 5, 0, 0],  # 5 comes back: another document
        [0, 0, 1, 1, 0, 1, 2, 2, 0, 2],
        [0] * 10,
    ]
    layout = layout_lib.packed(jnp.int32(ids))
    np.testing.assert_array_equal(
        layout.segments,
        [
            [1, 1, 2, 2, 2, 3, 0, 3, 0, 0],
            [0, 0, 1, 1, 0, 1, 2, 2, 0, 2],
            [0] * 10,
        ],
    )
    np.testing.assert_array_equal(
        layout.positions,
        [
            [0, 1, 0, 1, 2, 0, 0, 1, 0, 0],
            [0, 0, 0, 1, 0, 2, 0, 1, 0, 2],
            [0] * 10,
        ],
    )

  def test_appended_positions_go_on_where_the_cache_ends(self):
    layout = layout_lib.appended(
        jnp.int32([[1, 1, 0], [0, 0, 0]]), jnp.int32([7, 3])
    )
    np.testing.assert_array_equal(layout.positions, [[7, 8, 0], [0, 0, 0]])
    np.testing.assert_array_equal(layout.segments, [[1, 1, 0], [0, 0, 0]])


if __name__ == "__main__":
  absltest.main()
