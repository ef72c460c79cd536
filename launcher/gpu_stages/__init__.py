"""The stages of one_gpu.py. Each is a table of measurements: (name, function from a Bench to rows)."""
