"""``speceyes show-config``: every setting, its value, and where that comes from."""

from __future__ import annotations

import sys

from ._settings import Config, Large, Mode, Set, Small, Tau, load


def show_config(
    config: Config = None,
    large: Large = None,
    small: Small = None,
    tau: Tau = None,
    mode: Mode = None,
    set_: Set = None,
) -> None:
    """Show every setting with its value and source; secrets are masked."""
    from ..orchestrator.errors import OrchestratorError

    try:
        loaded = load(config, large, small, tau, mode, set_)
    except OrchestratorError as error:
        sys.exit(f"speceyes show-config: {error}")
    width = max(len(s.key) for s in loaded.values)
    for setting in loaded.values:
        value = setting.value
        # A prompt has several lines, or none: quoted, it stays a row of the table.
        shown = repr(value) if isinstance(value, str) and (not value or "\n" in value) else str(value)
        print(f"{setting.key:<{width}}  {shown:<24}  {setting.source}")
