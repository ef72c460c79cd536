"""`asyncrl-launch config`: the reference of the config's fields, and the resolved config of a run."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict, replace

from rich.console import Console
from rich.markup import escape

from asyncrl.cli.commands.common import Commands, add_command, print_json
from asyncrl.cli.commands.run import checked, shown_config
from asyncrl.config.fields import find_field
from asyncrl.config.reference import FieldReference, all_fields, markdown, schema_text, select
from asyncrl.config.schema import ConfigError
from asyncrl.launch.experiment import draft_experiment
from asyncrl.launch.program import config_text
from asyncrl.launch.redact import redact

_DESCRIPTION = """Print the fields of a config: type, default, allowed values and meaning.

FIELD is a dotted path of a field, or of a section. Without it all fields are printed.

With --resolved: print the config that a run of RUN.yaml has on this machine, with a value in place of each `auto`, each
path and each derived value. It is the text of config.yaml in the run's folder. Secrets are hidden."""

_EPILOG = """examples:
  asyncrl-launch config train.optimizer
  asyncrl-launch config manager.max_head_offpolicyness
  asyncrl-launch config my_run.yaml train.batch_size=32 --resolved
  asyncrl-launch config --schema > schema.json    for editors: let the first line of a YAML file be
                                                  # yaml-language-server: $schema=schema.json

exit codes: 0 printed; 2 there is no such field, and the nearest one is named; or the config cannot work."""


def add_to(commands: Commands) -> None:
    parser = add_command(commands, "config", show, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("field", metavar="FIELD", nargs="?", default="", help="dotted path of a field or of a section")
    parser.add_argument(
        "overrides", metavar="key=value", nargs="*", help="with --resolved: fields that override those of RUN.yaml"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--schema", action="store_true", help="print the JSON schema of a config file")
    form.add_argument("--resolved", action="store_true", help="FIELD is RUN.yaml: print its config as a run has it")
    form.add_argument("--markdown", action="store_true", help="print the page docs/configuration.md")


def show(arguments: argparse.Namespace, console: Console) -> int:
    """Print the fields of a config, with type, default, allowed values and meaning."""
    if arguments.schema:
        sys.stdout.write(schema_text())
        return 0
    if arguments.markdown:
        sys.stdout.write(markdown())
        return 0
    if arguments.resolved:
        return _show_resolved(arguments)
    if arguments.overrides:
        raise ConfigError(
            f"{arguments.overrides[0]}: works with --resolved only, as in config RUN.yaml key=value --resolved"
        )
    found = select(arguments.field) if arguments.field else all_fields()
    if not found:
        near = find_field(arguments.field)
        raise ConfigError(f"there is no field {arguments.field}" + (f"; did you mean {near}?" if near else ""))
    if arguments.json:
        print_json(found)
        return 0
    for field in found:
        for line in _lines(field):
            console.print(line, highlight=False, soft_wrap=True)
    return 0


def _show_resolved(arguments: argparse.Namespace) -> int:
    asked = draft_experiment(arguments.field, arguments.overrides)
    # Nothing is started, so a complete run in the folder is no obstacle
    draft = replace(asked, config=replace(asked.config, recover="off"))
    found = shown_config(*checked(draft, Console(stderr=True), download=False))
    config = replace(found, recover=asked.config.recover)
    if arguments.json:
        print_json(redact(asdict(config)))
    else:
        sys.stdout.write(config_text(config, redacted=True))
    return 0


def _lines(field: FieldReference) -> list[str]:
    limits = " | ".join(value or '""' for value in field.allowed) or field.limits
    head = f"[bold]{escape(field.path)}[/bold]: {escape(field.type)} = {escape(field.default)}"
    return [
        f"{head}  ({escape(limits)})" if limits else head,
        *([f"    {escape(field.meaning)}"] if field.meaning else []),
    ]
