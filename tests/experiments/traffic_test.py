"""The bytes that a compiled program moves."""

from absl.testing import absltest

from experiments.ablations.depth import traffic

# Three trips; each reads a row of [3, 256] fp32 (1 KiB) and [256] bf16 (half a
# KiB), and writes a row of the same stack in place. Then a copy of it all.
_PROGRAM = """\
HloModule small

%fused (p.0: f32[3,256], p.1: bf16[256], p.2: s32[]) -> f32[3,256] {
  %p.0 = f32[3,256]{1,0} parameter(0)
  %p.1 = bf16[256]{0} parameter(1)
  %p.2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  %row = f32[1,256]{1,0} dynamic-slice(%p.0, %p.2, %zero), dynamic_slice_sizes={1,256}
  %wide = f32[256]{0} convert(%p.1)
  %view = f32[1,256]{1,0} bitcast(%wide)
  %sum = f32[1,256]{1,0} add(%row, %view)
  ROOT %new = f32[3,256]{1,0} dynamic-update-slice(%p.0, %sum, %p.2, %zero)
}

%body (arg: (s32[], f32[3,256], bf16[256])) -> (s32[], f32[3,256], bf16[256]) {
  %arg = (s32[], f32[3,256]{1,0}, bf16[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f32[3,256]{1,0} get-tuple-element(%arg), index=1
  %y = bf16[256]{0} get-tuple-element(%arg), index=2
  %step = f32[3,256]{1,0} fusion(%x, %y, %i), kind=kLoop, calls=%fused
  ROOT %out = (s32[], f32[3,256]{1,0}, bf16[256]{0}) tuple(%i, %step, %y)
}

ENTRY %main (start: (s32[], f32[3,256], bf16[256])) -> f32[3,256] {
  %start = (s32[], f32[3,256]{1,0}, bf16[256]{0}) parameter(0)
  %loop = (s32[], f32[3,256]{1,0}, bf16[256]{0}) while(%start), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %last = f32[3,256]{1,0} get-tuple-element(%loop), index=1
  ROOT %copy = f32[3,256]{1,0} copy(%last)
}
"""


class TrafficTest(absltest.TestCase):

  def test_slices_trips_and_updates_in_place_count_as_what_they_touch(self):
    index = 4
    trip = 1024 + 512 + index + 1024
    self.assertEqual(traffic.moved_bytes(_PROGRAM), 3 * trip + 2 * 3 * 1024)


if __name__ == "__main__":
  absltest.main()
