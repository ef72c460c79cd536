"""What a run can be told: the schema, presets, how a file is read, and what could not work."""
