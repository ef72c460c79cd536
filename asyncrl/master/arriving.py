"""Which stored groups a detached frozen model processes next, while the trainer trains (train.arriving_inference). Pure.

    a group is stored -> ArrivingGroups -> a chunk: the model's workers fetch its inputs and compute its output keys
    a step -> takes the outputs that exist, and runs the MFC on the rest (homes.ArrivingInference)

The storage tracker (buffer.py) records what has been processed. If the detached group ends, the tracker forgets its data, so the
groups count as not processed again. The same holds after a refresh of the reference.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from asyncrl.protocol.trajectories import TrajectoryMeta


class ArrivingGroups:
    """Decides which groups form the next chunk: those that are trained first, at most max_tokens tokens. Pure.

    Groups are trained in about the order of the oldest version that sampled them. No group is processed that will be trained only
    after the model's weights have changed, because its outputs must come from the weights of its step.
    """

    def __init__(self, *, max_tokens: int, batch_size: int, update_interval: int) -> None:
        """update_interval: steps between two refreshes of the model (train.ref.update_interval); 0: it never changes."""
        self._max_tokens, self._batch_size, self._update_interval = max_tokens, batch_size, update_interval

    def next_chunk(
        self, stored: Sequence[TrajectoryMeta], done: Collection[str], *, version: int, num_left: int
    ) -> list[TrajectoryMeta]:
        """Return the groups to process now; empty: none. stored: the groups that are in no batch yet, in order of arrival. done:
        tickets that have been processed. version: the running step trains from it, or the next step will. num_left: the number of
        stored groups that this step will still take."""
        ordered = sorted(stored, key=lambda meta: min(meta.version_start))  # stable
        if self._update_interval:
            further_steps = self._update_interval - version % self._update_interval - 1
            ordered = ordered[: num_left + further_steps * self._batch_size]
        chunk: list[TrajectoryMeta] = []
        num_tokens = 0
        for meta in ordered:
            if meta.ticket_id in done:
                continue
            num_tokens += sum(meta.seqlens)
            if chunk and num_tokens > self._max_tokens:
                break
            chunk.append(meta)
        return chunk
