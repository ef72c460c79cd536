"""Weights on disk and between processes: versions and their transfer, checkpoints, and a run's lineage of checkpoints."""
