"""`baton doctor`: what this machine can run, and why not."""

from __future__ import annotations

import dataclasses
import json

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from baton import __version__
from baton.cli.checks import Check, run_checks

MARKS = {"ok": "[green]✓[/]", "note": "[yellow]![/]", "absent": "[dim]-[/]", "bad": "[red]✗[/]"}


def _table(findings: list[Check]) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    section = ""
    for check in findings:
        if section and check.section != section:
            table.add_row()
        title = "" if check.section == section else f"[bold]{check.section}[/]"
        table.add_row(title, MARKS[check.verdict], escape(check.name), escape(check.detail))
        section = check.section
    return table


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(as_json: bool) -> None:
    """Say what this machine can run, and why not.

    Looks at Python, memory, shared memory, torch, GPUs, attention backends, transports, the demo model and
    the default ports. Exits with 0 unless Baton cannot run here at all.

    \b
    Examples:
      baton doctor
      baton doctor --json | jq '.checks[] | select(.verdict != "ok")'
    """
    console = Console()
    if as_json:
        findings = list(run_checks())
    else:
        with console.status("Looking at this machine"):
            findings = list(run_checks())
    broken = [check for check in findings if check.verdict == "bad"]
    if as_json:
        checks = [dataclasses.asdict(check) for check in findings]
        click.echo(json.dumps({"version": __version__, "can_run": not broken, "checks": checks}, indent=2))
    else:
        console.print(f"Baton {__version__}", highlight=False)
        console.print(_table(findings), highlight=False)
        console.print("\nBaton can run here." if not broken else "\nBaton cannot run here: see ✗ above.")
    raise SystemExit(1 if broken else 0)
