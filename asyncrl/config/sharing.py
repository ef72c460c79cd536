"""When sequences compute the tokens at their begin once that are equal in them (train.share_prefix)."""

from __future__ import annotations

from asyncrl.config.schema import TrainConfig

_LEAST_SHARED = 0.05  # share of a batch's tokens, from which `auto` shares them


def may_share(train: TrainConfig, *, has_routes: bool) -> bool:
    """has_routes: the engine may have chosen other experts for each copy of a token."""
    return train.share_prefix != "off" and train.compile != "on" and not has_routes


def is_worth_sharing(train: TrainConfig, copies: int, tokens: int) -> bool:
    """copies: those of the tokens of a batch that another sequence of their row has."""
    return train.share_prefix == "on" or copies >= _LEAST_SHARED * tokens
