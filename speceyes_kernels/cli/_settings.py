"""The flags that choose settings, shared by the commands that run the funnel."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Config = Annotated[Path | None, typer.Option(help="YAML or TOML file of settings.")]
Large = Annotated[
    str | None, typer.Option(help="The agentic model: MODEL@http://host:port[,...], or a folder or name to run here.")
]
Small = Annotated[str | None, typer.Option(help="The model that drafts, given alike.")]
Tau = Annotated[float | None, typer.Option(help="Accept drafts above this confidence.")]
Mode = Annotated[str | None, typer.Option(help="funnel, base, draft-only, tools-off or specreason.")]
Set = Annotated[list[str] | None, typer.Option("--set", "-s", help="Any setting: funnel.gate.k=48 (see show-config).")]


def load(
    config: Path | None,
    large: str | None,
    small: str | None,
    tau: float | None,
    mode: str | None,
    set_: list[str] | None,
) -> Any:
    """Checked settings with their sources."""
    from ..orchestrator.config import engine_flag, load_settings, parse_flag

    flags: dict[str, Any] = dict(parse_flag(text) for text in set_ or ())
    for name, text in (("large", large), ("small", small)):
        if text is not None:
            flags |= {f"{name}.{key}": value for key, value in engine_flag(text).items()}
    if tau is not None:
        flags["funnel.gate.tau"] = tau
    if mode is not None:
        flags["funnel.mode"] = mode
    return load_settings(flags, file=config)
