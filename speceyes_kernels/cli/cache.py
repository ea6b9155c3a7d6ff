"""``speceyes cache``: files of draft caches."""

from __future__ import annotations

import json as json_
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..cache_file import CacheFileError, cache_info, merge_caches

cache = typer.Typer(add_completion=False, no_args_is_help=True, help="Show and merge files of draft caches.")


def _show(info: dict[str, int], json: bool) -> None:
    if json:
        typer.echo(json_.dumps(info))
        return
    for name, value in info.items():
        typer.echo(f"{name:17}{value:>15,}")


@cache.command()
def info(
    file: Annotated[Path, typer.Argument(help="A file that DraftCache.save wrote.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what a file holds, after checking all of it."""
    try:
        _show(cache_info(file), json)
    except (CacheFileError, OSError) as error:
        sys.exit(f"speceyes cache info: {error}")


@cache.command()
def merge(
    files: Annotated[list[Path], typer.Argument(help="Files to merge, of replicas for example.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The merged file; may be one of the files.")],
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Merge files into one; a response that several have is kept once."""
    try:
        _show(merge_caches(files, out), json)
    except (CacheFileError, OSError) as error:
        sys.exit(f"speceyes cache merge: {error}")
