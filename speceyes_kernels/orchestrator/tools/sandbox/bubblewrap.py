"""The sandbox's second way: bubblewrap makes the namespaces and the file view. Standard library only."""

from __future__ import annotations

import glob
import json
import os
import sys
import sysconfig
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
if __package__ in (None, ""):
    import child
else:  # pragma: no cover
    from . import child


def arguments(settings: dict[str, Any], shown: list[str], links: list[tuple[str, str]], alive: int) -> list[str]:
    """bwrap's command line for the same view, namespaces and process as the launcher's own ways."""
    python = os.path.realpath(sys.executable)
    library = os.path.join(sysconfig.get_config_var("LIBDIR") or "/nonexistent", "libpython*.so*")
    command = [settings["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--as-pid-1", "--new-session"]
    command += ["--uid", "1000", "--gid", "1000", "--hostname", child.HOSTNAME, "--clearenv", "--cap-drop", "ALL"]
    for folder in shown:
        command += ["--ro-bind", folder, folder]
    files = [python, *glob.glob(library), _HERE]
    for file in files:
        if not any(file.startswith(folder + "/") for folder in shown):
            command += ["--ro-bind", file, file]
    for path, real in links:
        command += ["--symlink", os.path.relpath(real, os.path.dirname(path)), path]
    for device in ("null", "zero", "urandom"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--size", str(settings["folder_bytes"]), "--perms", "0700", "--tmpfs", child.FOLDER]
    if not any((folder + "/").startswith("/tmp/") for folder in (*shown, *files)):
        command += ["--symlink", child.FOLDER[1:], "/tmp"]
    command += ["--remount-ro", "/", "--chdir", child.FOLDER, "--"]
    return [*command, python, "-I", "-S", "-B", os.path.join(_HERE, "child.py"), json.dumps(settings), str(alive)]


def execute(settings: dict[str, Any], shown: list[str], links: list[tuple[str, str]], alive: int) -> None:
    """Become bwrap."""
    os.set_inheritable(alive, True)
    os.execve(settings["bwrap"], arguments(settings, shown, links, alive), {})
