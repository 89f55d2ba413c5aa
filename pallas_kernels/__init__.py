"""Fast functions on plain arrays; knows nothing of flax, configs or meshes."""
