"""Subcommands, each imported only when it is run: listing them or running one never needs another's dependencies.

A subcommand ``name`` is a typer function, or a ``typer.Typer`` with subcommands of its own, called ``name`` (dashes as
underscores) in ``speceyes_kernels.cli.name``.
"""

from __future__ import annotations

import importlib
import sys

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Kernels for serving LLM agents on vLLM.")


def _subcommand(name: str, summary: str, needs: str) -> None:
    """Registers a placeholder that hands its arguments, ``--help`` too, to the real command."""

    def run(context: typer.Context) -> None:
        module_name = name.replace("-", "_")
        try:
            module = importlib.import_module(f".{module_name}", __package__)
        except ImportError as error:
            sys.exit(f"speceyes {name}: {error}\nIt needs {needs}.")
        command = getattr(module, module_name)
        if not isinstance(command, typer.Typer):
            command = typer.Typer(add_completion=False)
            command.command()(getattr(module, module_name))
        typer.main.get_command(command).main(args=context.args, prog_name=f"speceyes {name}")

    app.command(
        name,
        help=summary,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run)


_subcommand(
    "collect-env",
    "Show what this machine, torch and build offer, and why a backend is missing.",
    "the core package only; please report this",
)
_subcommand("cache", "Show and merge files of draft caches.", "the core package only; please report this")
_subcommand(
    "demo",
    "Score and gate answers inside a running vLLM, on real weights.",
    "vLLM, gguf, matplotlib and the weights; in a checkout `make install` brings all of it",
)
_subcommand(
    "replay",
    "Replay recorded agent rollouts against drafters: ours, Arctic Inference's suffix cache, ngram.",
    "tokenizers, rich and matplotlib; in a checkout `make install` brings all of it",
)
_ORCHESTRATOR = "the extra orchestrator: pip install 'speceyes_kernels[cli,orchestrator]'"
_subcommand("calibrate", "Choose the gate's thresholds on scored answers, with a guarantee if asked.", _ORCHESTRATOR)
_subcommand(
    "eval",
    "Report accuracy, speedup, ablations and plots of every mode on a data set.",
    "the extras orchestrator and eval: pip install 'speceyes_kernels[cli,orchestrator,eval]'",
)
_subcommand(
    "benchmark",
    "Train, and measure on, the project's own pair of small vision-language models.",
    "vLLM, transformers and the extras orchestrator and eval; in a checkout `make install` brings all of it",
)
_subcommand("simulate", "Say what speculation would gain: from a run folder, for any fleet.", _ORCHESTRATOR)
_subcommand("run", "Answer questions by judge, draft, gate and tool loop over two models.", _ORCHESTRATOR)
_subcommand(
    "serve",
    "Serve the funnel as an OpenAI-compatible API.",
    "the extras orchestrator and serve: pip install 'speceyes_kernels[cli,orchestrator,serve]'",
)
_subcommand("show-config", "Show every setting of the funnel, its value, and where that comes from.", _ORCHESTRATOR)


@app.callback()
def _group() -> None:
    """Keeps subcommands even while there is only one."""
