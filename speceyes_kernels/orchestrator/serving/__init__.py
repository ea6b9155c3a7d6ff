"""The funnel behind OpenAI's chat completions: ``create_app``, and ``serve`` for ``speceyes serve``."""

from .app import create_app

__all__ = ["create_app"]
