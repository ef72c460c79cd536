"""Makes a list of checks of a config, each independent of the others, and reports all their problems at once (pure)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from asyncrl.config.fields import Wrong, overlap
from asyncrl.config.schema import ConfigError, ExperimentConfig

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. fail: the run cannot work; warn: it may fail or be slow."""

    name: str
    state: State
    value: str
    remedy: str = ""


# Facts: what a check finds out and later checks need. A fact holds if its check was made and had no problem
FIELDS = "the fields"
MODEL = "model_path"
WEIGHTS = "the model's weights"
TOKENIZER = "the tokenizer"
PROMPTS = "the prompts"
TASKS = "the tasks"


@dataclass
class Case:
    """The config under examination, and what the checks have found out about its files. A check sets the values of its fact."""

    config: ExperimentConfig
    model: Mapping[str, object] = field(default_factory=dict)  # config.json of model_path
    num_parameters: int = 0
    num_prompts: int = 0  # training prompts; train_only: recorded groups to train on

    @property
    def tokenizer_path(self) -> str:
        return self.config.tokenizer_path or self.config.model_path


@dataclass(frozen=True)
class Check:
    """One check. `examine` yields a ConfigError for each problem and a Finding for each warning; it may raise its last ConfigError.
    The check is not made if a fact that it needs does not hold, or if a field that it reads is known to be wrong."""

    about: str  # the words for it in the line about checks that were not made
    examine: Callable[[Case], Iterable[ConfigError | Finding] | None]
    reads: tuple[str, ...] = ()  # fields and sections
    needs: tuple[str, ...] = ()
    gives: str = ""
    when: Callable[[ExperimentConfig], bool] = lambda config: True


@dataclass(frozen=True)
class Report:
    """What all checks found. problems: the config cannot work; each has field, value and remedy."""

    problems: list[str]
    warnings: list[Finding]
    not_made: list[str]  # the checks that need a fact that does not hold
    facts: frozenset[str]
    num_prompts: int  # 0: unknown

    def lines(self) -> list[str]:
        """All problems, and a line about the checks that were not made."""
        return [
            *self.problems,
            *([f"not checked before these are fixed: {', '.join(self.not_made)}"] if self.not_made else []),
        ]

    def refuse(self) -> None:
        """Raise ConfigError with all lines if there is a problem."""
        if self.problems:
            raise ConfigError("\n".join(self.lines()))


def make_checks(checks: Sequence[Check], config: ExperimentConfig, wrong: Sequence[Wrong]) -> Report:
    """Make the checks in order. wrong: problems of fields that are known already."""
    case, facts, fields = Case(config), set[str]() if wrong else {FIELDS}, [one.field for one in wrong]
    problems, warnings, not_made = [one.text for one in wrong], list[Finding](), list[str]()
    for check in checks:
        if not check.when(config) or overlap(check.reads, fields):
            continue
        if not facts.issuperset(check.needs):
            not_made.append(check.about)
            continue
        found = _results(check, case)
        texts = [str(result) for result in found if isinstance(result, ConfigError)]
        problems += [text for text in texts if text not in problems]
        warnings += [result for result in found if isinstance(result, Finding)]
        if check.gives and not texts:
            facts.add(check.gives)
    return Report(problems, warnings, not_made, frozenset(facts), case.num_prompts)


def _results(check: Check, case: Case) -> list[ConfigError | Finding]:
    found: list[ConfigError | Finding] = []
    try:
        found.extend(check.examine(case) or ())  # keeps what was found before an error
    except ConfigError as error:
        found.append(error)
    return found
