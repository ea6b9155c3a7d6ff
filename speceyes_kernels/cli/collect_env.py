"""``speceyes collect-env``."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import collect_env as report


def collect_env(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Print only the build and the backends.")] = False,
) -> None:
    """Show what this machine, torch and build offer, and why a backend is missing."""
    report.main(["--json"] if json else ["--summary"] if summary else [])
