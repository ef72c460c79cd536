"""Configuration: the schema, presets, loading of files, and validation."""
