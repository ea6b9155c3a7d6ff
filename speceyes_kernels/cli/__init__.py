"""The ``speceyes`` command (extra ``cli``)."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point; says how to get the extra when it is missing."""
    try:
        from .app import app
    except ImportError as error:
        sys.exit(
            f"speceyes: {error}. The command needs the extra cli:\n"
            f"    {sys.executable} -m pip install 'speceyes_kernels[cli]'\n"
            "Without it: python -m speceyes_kernels.collect_env"
        )
    app(prog_name="speceyes")
