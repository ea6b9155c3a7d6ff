"""What another pool, K, threshold or judge would have done, from stored scores and a run of the base agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..phases import Calibration, Gate
from ..settings import GateSettings, WordingSettings
from ..types import Query
from .results import ResultError, Row, Run

TAUS = (0.94, 0.95, 0.96, 0.97, 0.98, 0.99, 0.995)


def replay(
    name: str,
    queries: Sequence[Query],
    base: Run,
    drafts: Run,
    judged: Run | None,
    gate: GateSettings,
    *,
    calibration: Calibration | None = None,
) -> Run:
    """Decides every query anew; who is accepted has its draft's answer, who is not the base agent's.

    Parameters
    ----------
    base, drafts : Run
        Of the base agent, and one with a scored draft of every query that is drafted here (draft-only has all).
    judged : Run, optional
        A funnel's run, whose judge decided; None: every query is drafted.
    gate : GateSettings
        Pool, threshold, form and strictness; k must be the drafts' own.

    Returns
    -------
    Run
        Its seconds are summed from the three runs: each was measured under its own load.

    Raises
    ------
    ResultError
        The runs are of other queries, a draft is missing, was ended early, or was scored with another k.
    """
    runs = [run for run in (base, drafts, judged) if run is not None]
    ids = [query.id for query in queries]
    for run in runs:
        if [row.id for row in run.rows] != ids:
            raise ResultError(f"{run.name}: its rows are not those of the data set")
    k = drafts.settings.get("gate", {}).get("k")
    if k != gate.k:
        raise ResultError(
            f"{drafts.name}: its drafts were scored with k = {k}, asked for {gate.k}: each k needs drafts of its own"
        )
    names = {**drafts.models, **(judged or drafts).models}
    wording = WordingSettings.model_validate(drafts.settings.get("wording", {}))
    asked = wording.of_drafts(drafts.settings.get("draft", {}).get("depth", 0))
    door = Gate(gate, calibration, names.get("large") or "", drafts.models.get("small") or "", asked)
    judges: Sequence[Row | None] = judged.rows if judged is not None else [None] * len(queries)
    rows = []
    for query, slow, drafted, judge in zip(queries, base.rows, drafts.rows, judges, strict=True):
        rows.append(_row(query, slow, drafted, judge, door, drafts.name))
    settings: Mapping[str, object] = {"gate": gate.model_dump(mode="json"), "judge": "off" if judged is None else "run"}
    return Run(name, "funnel", tuple(rows), settings, names, how="replayed")


def _row(query: Query, slow: Row, drafted: Row, judge: Row | None, door: Gate, source: str) -> Row:
    decision, judge_s = ("no", 0.0) if judge is None else (judge.judge, judge.judge_s)
    if judge is not None and decision == "off":
        raise ResultError(
            f"query {query.id!r} was not judged ({judge.route}): nothing tells what the judge would have said"
        )
    seconds, route, right, failed, tools = judge_s, "loop:judge", slow.right, slow.failed, slow.tools
    kind, draft = slow.kind, drafted.draft if decision == "no" else None
    if decision != "no":
        route = "loop:judge" if decision == "tools" else "loop:error"
    elif draft is None:
        raise ResultError(f"{source}: query {query.id!r} has no draft; a run of mode draft-only has all")
    else:
        seconds += draft.seconds
        if draft.scores is not None and draft.scores.rejected_at is not None:
            raise ResultError(
                f"{source}: the draft of query {query.id!r} was ended early: its scores are not those of an answer; run the "
                "drafts with funnel.gate.reject_early=false"
            )
        verdict = door.decide(draft.scores, draft.kind, None) if not draft.error else None
        if verdict is None or verdict.error:
            route = "loop:error"
        elif verdict.accepted:
            route, right, failed, tools, kind = "draft", draft.right, False, 0, draft.kind
        else:
            route = "loop:gate"
    if route != "draft":
        seconds += slow.seconds
    return Row(
        slow.id, slow.split, kind, slow.picture, right, failed, route, seconds, seconds, tools,
        "off" if judge is None else decision, judge_s, draft,
    )  # fmt: skip
