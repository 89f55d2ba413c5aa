"""What `experiments.bench_kernels` times, checks and compares with."""
