"""What the package says when torch or numpy, all that its core needs, cannot be imported."""

from __future__ import annotations

import importlib
import sys

#: Importable name -> what to ask pip for.
_NEEDED = {"torch": "torch>=2.10", "numpy": "numpy"}
_REPORTERS = {"speceyes_kernels.collect_env", "collect-env"}


def _failure() -> tuple[str, Exception] | None:
    for name, requirement in _NEEDED.items():
        try:
            importlib.import_module(name)
        except Exception as error:  # a broken torch raises OSError, among others
            return (
                f"speceyes_kernels needs {name}, and `import {name}` failed: {type(error).__name__}: {error}\nRun:\n"
                f"    {sys.executable} -m pip install '{requirement}'\n"
                "(before a build of the native extension; see docs/building.md for CPU and CUDA builds of torch)"
            ), error
    return None


def failure() -> str | None:
    """Why the core cannot be imported, with the command that helps; None when it can."""
    found = _failure()
    return found and found[0]


def met() -> bool:
    """True when the core can be imported; False when it cannot and this process reports just that (collect_env).

    Raises
    ------
    ImportError
        Otherwise, with the exact command to run; the original error is chained.
    """
    found = _failure()
    if found is None:
        return True
    if _REPORTERS & set(sys.orig_argv):
        return False
    raise ImportError(found[0]) from found[1]
