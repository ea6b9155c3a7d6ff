"""Declares the operators that ``import torchvision`` asks for, where its compiled part cannot be loaded."""

from __future__ import annotations

import contextlib
import platform

_LIBRARIES = []  # a torch.library.Library takes its operators back when it is collected


def declare() -> None:
    """``torchvision::nms`` and ``torchvision::qnms``, without a kernel; does nothing where they exist, or where torchvision's
    own come with it: beside a CUDA torch, and on processors whose wheel is a CPU build. Declared here, they would stand in
    the way of those.

    As a platform plugin of vLLM it returns None: no platform is added.
    """
    try:
        import torch
    except ImportError:
        return
    if torch.version.cuda is not None or platform.machine() != "x86_64":
        return
    for name in ("nms", "qnms"):
        if hasattr(torch.ops.torchvision, name):
            continue
        library = torch.library.Library("torchvision", "FRAGMENT")
        with contextlib.suppress(RuntimeError):  # another copy of this module was quicker
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)
