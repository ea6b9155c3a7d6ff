"""What a request tells the draft proposer, as it arrives in ``extra_args`` (HTTP: ``vllm_xargs``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..structure import Structure, StructureError

#: Request fields.
AGENT, QUERY, STRUCTURE, DRAFT = "agent_id", "query_id", "structure", "speceyes_draft"
FIELDS = (AGENT, QUERY, STRUCTURE, DRAFT)
#: What ``speculative_config`` names.
PROPOSER = "speceyes_kernels.vllm.AgentSpecProposer"


class DraftOptionError(ValueError):
    """A bad request field; ``field`` is its name, e.g. ``structure``."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


@dataclass(frozen=True)
class DraftOptions:
    """Whose request it is, its delimiters, and whether it is drafted for. None: inferred, if the engine infers scopes."""

    agent_id: int | str | None = None
    query_id: int | str | None = None
    structure: str | None = None
    draft: bool = True


def parse_draft_options(extra: Mapping[str, Any] | None, check_structure: bool = True) -> DraftOptions:
    """Parses the drafting fields of ``extra_args``; others are left alone.

    Parameters
    ----------
    extra : mapping, optional
        ``agent_id``, ``query_id``: ints or strings. ``structure``: a structure string (see `StructureTracker`),
        ``""`` for no blocks.
        ``speceyes_draft``: 1 or 0, whether drafts are made for the request (it is learned from in any case).
    check_structure : bool
        Compile the structure string.

    Raises
    ------
    DraftOptionError
        Naming the field.
    """
    if not extra:
        return DraftOptions()
    for name in (AGENT, QUERY):
        value = extra.get(name)
        if isinstance(value, bool) or not isinstance(value, int | str | None):
            raise DraftOptionError(name, f"expected an int or a string, got {value!r}")
    structure = extra.get(STRUCTURE)
    if structure is not None:
        if not isinstance(structure, str):
            raise DraftOptionError(STRUCTURE, f"expected a structure string, got {structure!r}")
        if check_structure:
            compile_structure(structure)
    draft = extra.get(DRAFT)
    if draft is not None and draft not in (0, 1):
        raise DraftOptionError(DRAFT, f"expected 0 or 1, got {draft!r}")
    return DraftOptions(extra.get(AGENT), extra.get(QUERY), structure, draft is None or bool(draft))


def drafting_options(
    *,
    agent_id: int | str | None = None,
    query_id: int | str | None = None,
    structure: str | None = None,
    draft: bool = True,
) -> dict[str, Any]:
    """Checked fields for ``extra_args`` or ``vllm_xargs``.

    Examples
    --------
    >>> SamplingParams(extra_args=drafting_options(agent_id="coder", query_id=7))  # doctest: +SKIP
    """
    value = {AGENT: agent_id, QUERY: query_id, STRUCTURE: structure, DRAFT: int(draft)}
    parse_draft_options(value)
    return {k: v for k, v in value.items() if v is not None}


def compile_structure(text: str) -> Structure:
    """`Structure`, with the request field's name in the error."""
    try:
        return Structure(text)
    except StructureError as error:
        raise DraftOptionError(STRUCTURE, str(error).removeprefix(f"{STRUCTURE}: ")) from None


def proposes(vllm_config: Any) -> bool:
    """Whether this engine drafts with `AgentSpecProposer`."""
    spec = getattr(vllm_config, "speculative_config", None)
    if spec is None or spec.method != "custom_class":
        return False
    package, _, name = PROPOSER.rpartition(".")
    return str(spec.model).startswith(package) and str(spec.model).endswith(name)
