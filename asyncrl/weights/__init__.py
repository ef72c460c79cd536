"""Weights on disk: versions and how they travel, checkpoints, and which of them a run descends from."""
