"""Answer kinds. Separability is not comparable between them, so thresholds and bounds hold per kind."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..types import KINDS, Kind

__all__ = ["KINDS", "Kind", "kind_of"]

_YES_NO = re.compile(r"\W*(yes|no)\b", re.IGNORECASE)
# A lone letter, bracketed or not, with or without the option's text behind a mark: "B", "(b)", "B. red".
_OPTION = re.compile(r"\W*[A-Z]\W*$|\W*\(?[A-Z][).:]\s", re.IGNORECASE)
_NUMBER = re.compile(r"\W*[-+]?\d[\d,. ]*\W*$")


def kind_of(draft: str, options: Sequence[str] = ()) -> Kind:
    """The kind of an answer whose query does not state one.

    Parameters
    ----------
    draft : str
        The draft's text. It is what the gate judges, so the kind may depend on it; it must not depend on labels.
    options : sequence of str
        The query's options; two or more make an ``option``, unless they are yes and no.

    Returns
    -------
    "option", "yes/no", "number" or "text".
    """
    if len(options) > 1:
        return "yes/no" if {o.strip().strip(".").lower() for o in options} == {"yes", "no"} else "option"
    if _YES_NO.match(draft):
        return "yes/no"
    if _NUMBER.match(draft):
        return "number"
    if _OPTION.match(draft):
        return "option"
    return "text"
