"""Which ranks compute on which ids of a batch, and how the data of the ids reach the workers that need them. Pure.

An id names a group of responses to one prompt. Its data are stored under keys. The master knows which worker holds which (id, key).
When a batch begins, `assign` gives every data-parallel rank of a model its part of the batch. It leaves ids where their data
already is, unless that puts the ranks out of balance. `plan_redistribution` then plans steps that move exactly the pairs (id, key)
that a worker needs and does not hold. Each worker receives each such pair once. The kinds of step:

    bcast     one worker sends the same data to several workers
    scatter   one worker sends different data to each of several workers
    gather    several workers send data to one worker

Workers execute these steps in order (asyncrl/model/data_manager.py). No step sends data between worker groups: a worker fetches
the data that it lacks from workers of the other group (worker_groups.py; `plan_fetches`, asyncrl/model/fetching.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from asyncrl.protocol.calls import RedistribStep

Holders = Mapping[str, Mapping[str, Collection[int]]]  # id -> key -> the workers that hold this key of this id


# ------------------------------------------------------------------------------------------------------------ assignment


def assign(
    ids: Sequence[str],
    costs: Mapping[str, int],
    holders: Mapping[str, Collection[int]],
    num_ranks: int,
    tolerance: float,
    *,
    earlier: Sequence[int] = (),
) -> list[list[str]]:
    """Return the ids of each rank, in the order of `ids`. With more ranks than ids, some ranks get none.

    costs: of each id. holders: the ranks that hold an id's data. An id without holders may go to any rank. earlier: by rank, the
    cost of what it has besides, which decides between ranks that are equal here.
    An id stays at one of its holders unless the fullest rank would have more than (1 + tolerance) times the mean cost.
    In that case ids move from the fullest rank to the emptiest rank until the limit holds, or until no move of a single id makes
    the fullest rank less full. If the limit then holds, every id that can return to one of its holders within the limit does so.
    The result is deterministic.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; use at least 1")
    homes = {group: sorted(holders.get(group, ())) or list(range(num_ranks)) for group in ids}
    place: dict[str, int] = {}
    loads, before = [0] * num_ranks, earlier or [0] * num_ranks
    free = sorted((group for group in ids if len(homes[group]) > 1), key=lambda group: -costs[group])  # stable
    for group in [*(group for group in ids if len(homes[group]) == 1), *free]:
        place[group] = min(homes[group], key=lambda rank: (loads[rank], before[rank], rank))
        loads[place[group]] += costs[group]

    def move(group: str, rank: int) -> None:
        loads[place[group]] -= costs[group]
        loads[rank] += costs[group]
        place[group] = rank

    limit = (1 + tolerance) * sum(loads) / num_ranks
    while (fullest := max(loads)) > limit:
        top, low = loads.index(fullest), loads.index(min(loads))
        here = [group for group in ids if place[group] == top and 0 < costs[group] < fullest - loads[low]]
        if not here:
            break
        move(_best_to_move([(group, costs[group]) for group in here], fullest, loads[low], limit), low)
    returned = max(loads) <= limit
    while returned:
        returned = False
        for group in ids:
            home = min(homes[group], key=lambda rank: (loads[rank], rank))
            if place[group] not in homes[group] and loads[home] + costs[group] <= limit:
                move(group, home)
                returned = True
    return [[group for group in ids if place[group] == rank] for rank in range(num_ranks)]


def _best_to_move(here: Sequence[tuple[str, int]], top: int, low: int, limit: float) -> str:
    """Return the id to move. First choice: the smallest one that brings both ranks within the limit. Second choice: the largest
    one that keeps the low rank within it. Otherwise: the one that minimizes the larger load of the two ranks."""
    fit = [(group, size) for group, size in here if low + size <= limit]
    enough = [(group, size) for group, size in fit if top - size <= limit]
    if enough:
        return min(enough, key=lambda entry: entry[1])[0]
    if fit:
        return max(fit, key=lambda entry: entry[1])[0]
    return min(here, key=lambda entry: max(top - entry[1], low + entry[1]))[0]


# ------------------------------------------------------------------------------------------------------------------ plan


def plan_redistribution(
    needed: Mapping[int, Sequence[str]], keys: Sequence[str], holders: Holders
) -> list[RedistribStep]:
    """Return steps after which each worker has these keys of the ids it needs. Raises ValueError for a pair without a holder.

    If several workers hold a pair, the sender is the one that has the fewest pairs to send in the plan so far.
    """
    wanted: dict[str, list[int]] = {}
    for worker, ids in needed.items():
        for group in ids:
            wanted.setdefault(group, []).append(worker)
    sent: dict[int, int] = {}
    to_several: dict[tuple[int, tuple[int, ...], tuple[str, ...]], list[str]] = {}
    to_one: dict[tuple[str, ...], dict[tuple[int, int], list[str]]] = {}
    for group, workers in wanted.items():
        for (sources, targets), missing in _missing(group, workers, keys, holders).items():
            root = min(sources, key=lambda worker: (sent.get(worker, 0), worker))
            sent[root] = sent.get(root, 0) + len(missing) * len(targets)
            if len(targets) > 1:
                to_several.setdefault((root, targets, missing), []).append(group)
            else:
                to_one.setdefault(missing, {}).setdefault((root, targets[0]), []).append(group)
    steps = [
        RedistribStep("bcast", root, list(targets), [ids], list(moved))
        for (root, targets, moved), ids in to_several.items()
    ]
    for moved, pairs in to_one.items():
        steps += _steps_to_one(moved, pairs)
    return steps


def _missing(
    group: str, workers: Sequence[int], keys: Sequence[str], holders: Holders
) -> dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, ...]]:
    """Return the keys of an id that some of `workers` lack, by (workers that hold these keys, workers that lack them)."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, ...]] = {}
    for key in keys:
        have = holders.get(group, {}).get(key, ())
        targets = tuple(worker for worker in workers if worker not in have)
        if not targets:
            continue
        if not have:
            raise ValueError(f"no worker holds the key {key!r} of id {group!r}, which the workers {list(targets)} need")
        pair = tuple(sorted(have)), targets
        found[pair] = (*found.get(pair, ()), key)
    return found


def _steps_to_one(keys: tuple[str, ...], pairs: Mapping[tuple[int, int], list[str]]) -> Iterator[RedistribStep]:
    """Group transfers that each have one receiver into scatters (one step per sender) or into gathers (one step per receiver),
    whichever gives fewer steps."""
    roots, targets = dict.fromkeys(root for root, _ in pairs), dict.fromkeys(target for _, target in pairs)
    if len(targets) < len(roots):
        for target in targets:
            members = {root: ids for (root, to), ids in pairs.items() if to == target}
            yield RedistribStep("gather", target, list(members), list(members.values()), list(keys))
        return
    for root in roots:
        members = {to: ids for (source, to), ids in pairs.items() if source == root}
        yield RedistribStep("scatter", root, list(members), list(members.values()), list(keys))


def plan_fetches(
    needed: Mapping[int, Sequence[str]], keys: Sequence[str], there: Holders, sources: Collection[int]
) -> list[Transfer]:
    """Return the fetches by which each worker gets these keys of the ids it needs from workers of other groups.

    Each pair comes from a worker of `sources` that holds it: the one with the fewest pairs to serve in the plan so far. Raises
    ValueError for a pair that no worker of `sources` holds. there: the workers that hold each pair now. A worker to which a pair is
    still on its way is not among them.
    """
    asked: dict[int, int] = {}
    found: dict[tuple[int, int, tuple[str, ...]], list[str]] = {}
    for worker, ids in needed.items():
        for group in ids:
            held = there.get(group, {})
            lacking: dict[int, tuple[str, ...]] = {}
            for key in keys:
                have = held.get(key, ())
                if worker in have:
                    continue
                able = [source for source in have if source in sources]
                if not able:
                    raise ValueError(
                        f"none of the sources holds the key {key!r} of id {group!r}, which worker {worker} needs"
                    )
                source = min(able, key=lambda other: (asked.get(other, 0), other))
                lacking[source] = (*lacking.get(source, ()), key)
            for source, of_source in lacking.items():
                asked[source] = asked.get(source, 0) + len(of_source)
                found.setdefault((worker, source, of_source), []).append(group)
    return [Transfer(source, (worker,), tuple(ids), of) for (worker, source, of), ids in found.items()]


# --------------------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Transfer:
    """Data that one worker sends to others. Each of `targets` gets the same data."""

    source: int
    targets: tuple[int, ...]
    ids: tuple[str, ...]
    keys: tuple[str, ...]


def transfers(step: RedistribStep) -> list[Transfer]:
    """Split a step into transfers, in the order in which all workers execute them. Raises ValueError for a malformed step."""
    keys = tuple(step.keys)
    if step.kind == "bcast":
        if len(step.ids) != 1:
            raise ValueError(f"a bcast has {len(step.ids)} lists of ids; it must have exactly one")
        return [Transfer(step.root, tuple(step.workers), tuple(step.ids[0]), keys)]
    if len(step.ids) != len(step.workers):
        raise ValueError(
            f"a {step.kind} has {len(step.ids)} lists of ids for {len(step.workers)} workers; it needs one for each worker"
        )
    each = zip(step.workers, step.ids, strict=True)
    if step.kind == "scatter":
        return [Transfer(step.root, (worker,), tuple(ids), keys) for worker, ids in each]
    return [Transfer(worker, (step.root,), tuple(ids), keys) for worker, ids in each]


def members(steps: Iterable[RedistribStep]) -> list[int]:
    """Return all workers that take part in any of the steps."""
    return sorted({worker for step in steps for worker in (step.root, *step.workers)})
