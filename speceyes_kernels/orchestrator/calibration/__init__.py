"""Thresholds chosen on data: scored rows, objectives, a guarantee, curves, the artifact. Imports no engine."""

from .artifact import Artifact, ArtifactError, KindThreshold, load_artifact, save_artifact
from .curves import calibration_error, isotonic, reliability, risk_coverage, roc
from .guarantee import Bound, Guarantee, expected_wrong_accepted, guarantee, upper_bound
from .kinds import KINDS, kind_of
from .objectives import Selection, select
from .resampling import Resampled, resample
from .table import Row, Table, TableError, in_calibration_split

__all__ = [
    "KINDS",
    "Artifact",
    "ArtifactError",
    "Bound",
    "Guarantee",
    "KindThreshold",
    "Resampled",
    "Row",
    "Selection",
    "Table",
    "TableError",
    "calibration_error",
    "expected_wrong_accepted",
    "guarantee",
    "in_calibration_split",
    "isotonic",
    "kind_of",
    "load_artifact",
    "reliability",
    "resample",
    "risk_coverage",
    "roc",
    "save_artifact",
    "select",
    "upper_bound",
]
