"""`asyncrl-launch check`."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from asyncrl.config import load_experiment
from asyncrl.launch.commands.common import Commands, add_config_command
from asyncrl.launch.preflight import preflight, visible_devices
from asyncrl.launch.program import plan, run_directory, total_steps


def add_to(commands: Commands) -> None:
    add_config_command(commands, "check", check)


def check(arguments: argparse.Namespace, console: Console) -> int:
    """Validate a config and the files it names, print the processes, start nothing."""
    config = load_experiment(arguments.config, arguments.overrides)
    num_prompts = preflight(config)
    specs = plan(config, attempt=1, num_prompts=num_prompts, devices=visible_devices())
    table = Table(title=f"{run_directory(config)}", title_justify="left")
    for column in ("process", "uses", "environment"):
        table.add_column(column)
    for spec in specs:
        env = " ".join(f"{key}={value}" for key, value in sorted(spec.env.items()))
        table.add_row(spec.name, "a core or device" if spec.computes else "little", env)
    console.print(table)
    eta, batch_size = config.manager.max_head_offpolicyness, config.train.batch_size
    steps = total_steps(config, num_prompts)
    console.print(
        f"{num_prompts} prompts x {config.train.num_epochs} epochs, {steps} steps of {batch_size} prompts x "
        f"{config.rollout.group_size} responses; eta = {eta}: at most {(1 + eta) * batch_size} prompts live",
        highlight=False,
    )
    console.print("[green]ok[/]: this config can run")
    return 0
