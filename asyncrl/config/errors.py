"""The error of a config that cannot work.

Not in schema.py, because the program that runs reward functions (judge_main.py) starts ten times faster without the schema.
"""

from __future__ import annotations


class ConfigError(ValueError):
    """The config cannot work; the message names field, value and remedy."""
