"""The library's own wording of what models are asked; `settings.WordingSettings` replaces it."""

from __future__ import annotations

from collections.abc import Mapping

from .types import Kind

JUDGE = (
    "Someone must answer the question below. Tools could help: zooming into a part of the image, or running code.\n\n"
    "Question: {question}\n\n"
    "Would using a tool make the answer more reliable than answering at once? Answer with one word, yes or no."
)
ENDS: Mapping[Kind, str] = {
    "option": "Answer with the letter of the option and nothing else.",
    "yes/no": "Answer with yes or no and nothing else.",
    "number": "Answer with the number and nothing else.",
    "text": "Answer with a word or a short phrase and nothing else.",
}
BRIEFLY = "Answer as briefly as you can."  # of a question whose kind nobody knows
RATE = (
    "Above is the beginning of an answer. How much does its last step help to answer correctly? Reply with one digit, "
    "from 0 (useless or wrong) to 9 (right and useful)."
)
QUESTION, TOOLS = "{question}", "{tools}"  # the placeholders of the judge's and of the system's text
