"""The train state, its steps, and what a run keeps on disk."""
