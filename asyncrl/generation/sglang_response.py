"""A response of SGLang as it grows, piece by piece: each piece is checked before a token of it counts. Pure."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from asyncrl.generation.queueing import Pending
from asyncrl.generation.sglang_http import Piece, SGLangError
from asyncrl.protocol.messages import FinishReason, VersionSpan, WeightVersion


@dataclass(eq=False, slots=True)
class GrowingResponse(Pending):
    """A request in flight, and what it has so far. It may be sent to SGLang several times, with that as its prefix."""

    begin: int = 0  # how many tokens it had when it was sent
    retracted: bool = False  # when it ends there, it is to wait here and go on
    ended: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # there, since it was sent

    def sent(self) -> None:
        """It goes to SGLang, from where it stands."""
        self.begin, self.retracted, self.ended = len(self.token_ids), False, asyncio.Event()

    def take(self, piece: Piece) -> int:
        """Append what a piece brings; returns how many tokens. Raises SGLangError where its parts do not fit each other.

        A piece has what is new, or all so far (`completion_tokens` tells which). One that aborts a request in SGLang's queue
        repeats the last token: nothing is new then.
        """
        meta = piece.meta_info
        new = meta.completion_tokens - (len(self.token_ids) - self.begin)
        tokens, rows = piece.output_ids, meta.output_token_logprobs
        if new < 0 or len(tokens) < new or len(rows) < new:
            raise SGLangError(f"{len(tokens)} tokens and {len(rows)} logprobs where {new} should be new")
        if new == 0:
            return 0
        tokens, rows = tokens[-new:], rows[-new:]
        logprobs = [math.nan if row[0] is None else row[0] for row in rows]
        if [row[1] for row in rows] != tokens:
            raise SGLangError("tokens and logprobs are not of the same response")
        if not all(map(math.isfinite, logprobs)):
            raise SGLangError("logprobs are not finite")
        self.token_ids += tokens
        self.logprobs += logprobs
        return new

    def natural_end(self, stop_ids: Sequence[int]) -> FinishReason | None:
        """How it would have ended by itself here: SGLang runs one more pass of what it aborts, and calls its token aborted too."""
        if self.token_ids and self.token_ids[-1] in stop_ids and len(self.token_ids) > self.begin:
            return FinishReason(type="stop", matched=self.token_ids[-1])
        if len(self.token_ids) >= self.request.params.max_new_tokens:
            return FinishReason(type="length", length=len(self.token_ids))
        return None

    def label(self, last: Piece, began: WeightVersion, served: WeightVersion | None) -> None:
        """Which version sampled what, by SGLang's own account, which must be ours. Raises SGLangError where it is not.

        began: the version when it was sent; served: the one now. These are one, unless SGLang was paused in place between.
        """
        end = self.begin
        for span in last.meta_info.weight_versions:
            start, stop = self.begin + span.start, self.begin + span.end
            if start != end or stop < start:
                break
            if stop > start:
                _check_label(span.version, began, served)
                self.spans.append(VersionSpan(version=span.version, start=start, end=stop))
            end = stop
        if end != len(self.token_ids):
            found = last.meta_info.weight_versions
            raise SGLangError(f"weight versions {found} do not cover {len(self.token_ids) - self.begin} tokens")


def _check_label(label: str, began: WeightVersion, served: WeightVersion | None) -> None:
    try:
        known = served is not None and began <= WeightVersion.parse(label) <= served
    except ValueError:
        known = False
    if not known:
        raise SGLangError(
            f"SGLang says that {label!r} sampled tokens; {served} is served, and was {began} when the request was sent: somebody "
            "else updates its weights"
        )
