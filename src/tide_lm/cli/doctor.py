"""`tide-lm doctor`: what this machine has, and what it lacks for TIDE."""

from typing import Any

import typer

from tide_lm.cli.options import AsJson
from tide_lm.cli.output import print_json, print_next, print_table
from tide_lm.cli.progress import working
from tide_lm.run.optional import install


def command(as_json: AsJson = False) -> None:
    """Show what is installed, the GPU and the disk; exit status 1 if something required is missing.

    Example: tide-lm doctor --json
    """
    from tide_lm.run.doctor import examine

    with working("Looking at this machine"):
        report = examine()
    print_json(report) if as_json else _print(report)
    if report["problems"]:
        raise typer.Exit(1)
    typer.echo("Nothing is missing.", err=True)
    print_next("tide-lm demo")


def _print(report: dict[str, Any]) -> None:
    cpu = report["cpu"]
    gpus = [f"{gpu['name']}, {gpu['memory_bytes'] / 1e9:.0f} GB" for gpu in report["gpus"]]
    rows = [
        ("tide-lm", report["tide_lm"]),
        ("Python", report["python"]),
        ("system", report["system"]),
        ("CPU", f"{cpu['name']}, {cpu['cores']} cores, {cpu['memory_bytes'] / 1e9:.0f} GB"),
        ("GPU", "; ".join(gpus) or "none: everything runs on the CPU"),
        ("C++ compiler", report["cpp_compiler"] or "none: torch.compile on a CPU needs g++"),
        ("disk free here", f"{report['disk_free_bytes'] / 1e9:,.0f} GB"),
    ]
    for name, version in report["packages"].items():
        extra = report["extras"].get(name)
        absent = f"not installed ({install(extra)})" if extra else "not installed"
        rows.append((name, version or absent))
    print_table("tide-lm doctor", ["what", "found"], rows, numbers=False)
    for problem in report["problems"]:
        typer.echo(f"problem: {problem}", err=True)
