"""Recorded trajectories for tests: groups of two responses, and whole recordings of them."""

from pathlib import Path

from msgspec.structs import asdict

from asyncrl.data.sequence import SequenceSample
from asyncrl.data.trajectories import Entry, TrajectoryStore, recording_dir
from asyncrl.protocol.trajectories import Locator, TrajectoryMeta
from asyncrl.protocol.versions import WeightVersion
from asyncrl.rewards.trajectory import Episode, Response, build_sample, complete_sample, summary_of


def make_group(
    position: int, *, version: int = 0, attempt: int = 1, rewards=(1.0, 0.0), lengths=(2, 3), first_token: int = 5
) -> tuple[TrajectoryMeta, SequenceSample]:
    """Return a prompt of two tokens and its responses, all sampled by one version. The last response is truncated."""
    packed = WeightVersion(attempt, version).pack()
    episodes = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        episode = Episode([1, 2])
        tokens = [first_token + number for number in range(length)]
        response = Response(
            [1, 2], tokens, [-0.5 - number for number in range(length)], [(packed, length)], index + 1 < len(lengths)
        )
        episode.add_response(response)
        episode.reward = reward
        episodes.append(episode)
    ticket = f"a{attempt}-e0-p{position}-i1-v{version}-h0-n_{position}"
    sample = build_sample(ticket, episodes)
    sample = complete_sample(sample, ticket_id=ticket, task_id=0, birth_time=100.0)
    meta = TrajectoryMeta(
        ticket_id=ticket,
        locator=Locator(0, position),
        attempt=attempt,
        head=0,
        keys=list(sample.keys),
        **asdict(summary_of(sample)),
        birth_time=100.0,
    )
    return meta, sample


def make_store(
    run_dir: Path, *, attempt: int = 1, trained=False, max_bytes=10**9, prune=False, tokenizer=""
) -> TrajectoryStore:
    folder = recording_dir(run_dir, attempt)
    name = "model_worker/0" if trained else "recorder/0"
    return TrajectoryStore(folder, name, trained=trained, max_bytes=max_bytes, prune=prune, tokenizer=tokenizer)


def record_batches(
    run_dir: Path, *, batches: int, size: int, first_step: int = 0, trained=False, lag: int = 0, **options
) -> TrajectoryStore:
    """Record `batches` batches of `size` groups. If trained, a group was sampled `lag` versions before its step."""
    store = make_store(run_dir, trained=trained, **options)
    for step in range(first_step, first_step + batches):
        version = max(step - lag, 0) if trained else 0
        groups = [make_group(step * size + place, version=version) for place in range(size)]
        store.write(step, size, [Entry(sample, meta, place) for place, (meta, sample) in enumerate(groups)])
    return store
