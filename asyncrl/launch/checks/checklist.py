"""The checks of a config and a machine: their kind, and the report of all that they find.

asyncrl/cli/checks.py has the table of all checks. The life of a check:

    chosen    `run` and `check` take the rows of a place whose cost they accept
    skipped   if `when` is false, or if a field that it reads is known to be wrong
    not made  if a fact that it needs does not hold; the report names it
    made      `examine` reads the case, and yields a ConfigError for each problem and a Finding for each other result. It may raise
              its last ConfigError
    gives     its fact holds if it found no problem; it has then set the values of that fact in the case

A check starts no run and writes nothing. Every call in it that could hang has a time limit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from asyncrl.config.fields import Wrong, overlap
from asyncrl.config.resolve import Facts, resolve
from asyncrl.config.schema import ConfigError, ExperimentConfig
from asyncrl.launch.checks.gpus import Gpu, query_gpus
from asyncrl.launch.checks.model_files import bytes_of_models
from asyncrl.launch.program import ProcessSpec
from asyncrl.runtime.devices import visible_devices

State = Literal["ok", "warn", "fail"]
# config: a problem with which no run starts, whatever check found it
Place = Literal["config", "files", "tasks", "machine"]
# short: below a second, or some seconds if something does not answer. trial: the user's code or a small model runs, within limits.
# plan: up to minutes
Cost = Literal["short", "trial", "plan"]


@dataclass(frozen=True)
class Finding:
    """One result of a check. fail: the run cannot work; warn: it may fail or be slow. Its check's row gives place and cost."""

    name: str
    state: State
    value: str
    remedy: str = ""
    place: Place = "files"
    cost: Cost = "short"


def judge(name: str, value: str, *problems: tuple[bool, State, str]) -> Finding:
    """The finding about a value: the first problem that holds, or ok. A problem is: whether it holds, the state, the remedy."""
    found = (Finding(name, state, value, remedy) for holds, state, remedy in problems if holds)
    return next(found, Finding(name, "ok", value))


# Facts: what a check finds out and later checks need
FIELDS = "the fields"
MODEL = "model_path"
WEIGHTS = "the model's weights"
TOKENIZER = "the tokenizer"
PROMPTS = "the prompts"
TASKS = "the tasks"
PROCESSES = "the processes of a run"


@dataclass
class Case:
    """The config under examination, and what the checks have found out about its files. A check sets the values of its fact."""

    config: ExperimentConfig
    specs: Sequence[ProcessSpec] = ()  # of the run; empty: they are not known yet, or there is no config
    devices: Sequence[str] = field(default_factory=lambda: visible_devices())
    model: Mapping[str, object] = field(default_factory=dict)  # config.json of model_path
    num_parameters: int = 0
    num_prompts: int = 0  # training prompts; train_only: recorded groups to train on; 0: unknown
    disk_needed: int = 0  # bytes that the run is certain to write, beyond those of its old files; 0: none, or unknown
    disk_items: str = ""  # what these are, for people

    @property
    def tokenizer_path(self) -> str:
        return self.config.tokenizer_path or self.config.model_path

    @cached_property
    def resolved(self) -> ExperimentConfig:
        return resolve(self.config, Facts(on_gpu=bool(self.devices), model_bytes=bytes_of_models(self.config)))

    @cached_property
    def gpus(self) -> Sequence[Gpu] | str:
        """All GPUs of the machine, or the reason why the driver does not list them."""
        return query_gpus()


@dataclass(frozen=True)
class Check:
    """One row of a table of checks."""

    about: str  # the words for it in the line about checks that were not made
    examine: Callable[[Case], Iterable[ConfigError | Finding] | None]
    reads: tuple[str, ...] = ()  # fields and sections
    needs: tuple[str, ...] = ()  # facts
    gives: str = ""  # a fact
    when: Callable[[ExperimentConfig], bool] = lambda config: True
    place: Place = "files"
    cost: Cost = "short"


@dataclass(frozen=True)
class Report:
    """What all checks found."""

    case: Case
    findings: list[Finding] = field(default_factory=list)
    not_made: list[str] = field(default_factory=list)  # the checks that need a fact that does not hold
    facts: frozenset[str] = frozenset()

    def of(self, place: Place) -> list[Finding]:
        return [finding for finding in self.findings if finding.place == place]

    @property
    def problems(self) -> list[str]:
        """The config cannot work. Each has field, value and remedy."""
        return list(dict.fromkeys(finding.value for finding in self.of("config")))

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


def make_checks(checks: Sequence[Check], case: Case, wrong: Sequence[Wrong] = ()) -> Report:
    """Make the checks in order. wrong: problems of fields that are known already."""
    facts, fields = set() if wrong else {FIELDS}, [one.field for one in wrong]
    facts |= {PROCESSES} if case.specs else set()
    findings, not_made = [Finding(one.field, "fail", one.text, place="config") for one in wrong], list[str]()
    for check in checks:
        if not check.when(case.config) or overlap(check.reads, fields):
            continue
        if not facts.issuperset(check.needs):
            not_made.append(check.about)
            continue
        findings += (found := _results(check, case))
        if check.gives and not any(one.place == "config" for one in found):
            facts.add(check.gives)
    return Report(case, findings, not_made, frozenset(facts))


def _results(check: Check, case: Case) -> list[Finding]:
    found: list[ConfigError | Finding] = []
    try:
        found.extend(check.examine(case) or ())  # keeps what was found before an error
    except ConfigError as error:
        found.append(error)
    return [
        replace(one, place=check.place, cost=check.cost)
        if isinstance(one, Finding)
        else Finding(check.about, "fail", str(one), place="config", cost=check.cost)
        for one in found
    ]
