"""The table that `experiments.bench_kernels` ends with."""


def print_shape(name, result):
  """Prints a shape's times beside the floors and the fastest peer.

  Args:
    name: the shape's.
    result: {"rows": {implementation: {kind: (ms, spread), f"{kind} temp GiB",
      or f"{kind} failed"}}, "floors": {kind: (bytes ms, FLOPs ms)}, "parts":
      {kernel: (ms, spread)}}.
  """
  parts = result["parts"].items()
  print(f"\n{name}  " + " ".join(f"{part} {ms:.3f}" for part, (ms, _) in parts))
  for kind, floors in result["floors"].items():
    print(f"  {kind}: floors {floors[0]:.2f} ms bytes, {floors[1]:.2f} FLOPs")
    times = {}
    for label, row in result["rows"].items():
      if kind not in row:
        reason = row.get(f"{kind} failed", "not run")
        print(f"    {label:21} {reason.splitlines()[0][:90]}")
        continue
      times[label], spread = row[kind]
      print(
          f"    {label:21} {times[label]:8.3f} +-{spread:5.3f} ms"
          f" {times[label] / floors[0]:6.2f}x byte floor"
          f" {row[f'{kind} temp GiB']:6.2f} GiB"
      )
    ours = times.pop("ours")
    if times:
      fastest = min(times, key=times.get)
      ratio = times[fastest] / ours
      print(f"    the fastest peer, {fastest}, takes {ratio:.2f}x our time")


def print_decode(rows):
  """Prints {implementation: {"ms": (ms, spread)}} and the floor."""
  for label, row in rows.items():
    if isinstance(row, dict):
      print(f"decode {label:18} {row['ms'][0]:.4f} +-{row['ms'][1]:.4f} ms")
    else:
      print(f"decode {label:18} {row:.4f}")
