"""Linen modules: each holds parameters and calls functions on arrays."""
