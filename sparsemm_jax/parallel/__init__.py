"""Meshes of devices, and the rules that spread arrays over them."""
