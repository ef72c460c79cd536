"""Reads a config from its file and checks the whole of it once, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.config.fields import Wrong, default_of, leaf_values, overlap, with_leaves
from asyncrl.config.limits import rule_of
from asyncrl.config.loading import read_experiment
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.config.validation import Problem, problems_of_fields, problems_of_values
from asyncrl.dataflow.layout_checks import problems_of_layout
from asyncrl.dataflow.phases import phases


@dataclass(frozen=True)
class Draft:
    """A config as it was written, with the fields that cannot be used; the checks of files (launch/checks) can add more."""

    config: ExperimentConfig
    wrong: list[Wrong]

    def checked(self) -> ExperimentConfig:
        """The config. Raises ConfigError with every problem found, one per line."""
        if self.wrong:
            raise ConfigError("\n".join(text for _, text in self.wrong))
        return self.config


def draft_experiment(
    path: str | Path,
    overrides: Sequence[str] = (),
    change: Callable[[ExperimentConfig], ExperimentConfig] = lambda config: config,
) -> Draft:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults, and find the fields that cannot work.

    change: makes the config that is checked from the one that was read.

    Raises ConfigError if the file or an override cannot be read at all.
    """
    config, wrong = read_experiment(path, overrides)
    config = change(config)
    unread = [field for field, _ in wrong]
    # A field that could not be read has its default, and the user did not write that
    return Draft(config, wrong + [one for one in wrong_fields(config) if not overlap([one.field], unread)])


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """Merge a YAML file and dotted overrides (`train.batch_size=32`) onto the defaults, and check the result.

    Raises ConfigError with the field, its value, and the remedy or the nearest valid name.
    """
    return draft_experiment(path, overrides).checked()


def validate(config: ExperimentConfig) -> None:
    """Reject a config that cannot work. Raises ConfigError with every problem found, one per line."""
    Draft(config, wrong_fields(config)).checked()


def wrong_fields(config: ExperimentConfig) -> list[Wrong]:
    """Every field that cannot be used, with its value and the remedy."""
    found = list(problems_of_values(config))
    # The other checks compare fields, and a comparison with a value that is not allowed is meaningless: they see its default
    # instead. Problems of that default are left out, because the user did not write it
    wrong = {name.partition("[")[0] for name, _, _ in found}
    allowed = with_leaves(config, lambda path, value, entry: default_of(entry) if path in wrong else value)
    problems = [problem for problem in _problems_of_phases(allowed) if not overlap([problem[0]], wrong)]
    for path, value, entry in leaf_values(allowed):
        if problems and path in wrong and isinstance(value, str):
            # The user may have meant any of the words, so only the problems that come with all of them count
            for word in rule_of(entry).words:
                fields = {name for name, _, _ in _problems_of_phases(_with_value(allowed, path, word))}
                problems = [problem for problem in problems if problem[0] in fields]
    return [Wrong(name, f"{name}={value!r}: {remedy}") for name, value, remedy in [*found, *problems]]


def _with_value(config: ExperimentConfig, path: str, value: object) -> ExperimentConfig:
    return with_leaves(config, lambda name, old, _: value if name == path else old)


def _problems_of_phases(config: ExperimentConfig) -> Iterator[Problem]:
    """Yield each problem once: those of the fields, and those of the allocation of each phase."""
    yield from problems_of_fields(config)
    try:
        of_run = phases(config)
    except ValueError as error:
        yield "allocation", config.allocation, str(error)
        return
    if len(of_run) > 1 and not config.checkpoint.enabled:
        yield (
            "allocation",
            config.allocation,
            "a phase begins from the checkpoint of the phase before it: set checkpoint.every_s",
        )
    problems: list[Problem] = []
    for phase in of_run:
        problems += [problem for problem in problems_of_layout(phase) if problem not in problems]
    yield from problems
