"""Discrete-event model of the funnel and of the base agent: what would speculation gain? Imports no engine."""

from .formula import Averages, expected_gain, expected_latency, limit_gain
from .model import Fleet, FunnelModel, LoopStep, Outcome, Profile, Query, Workload, simulate
from .station import StationSpec

__all__ = [
    "Averages",
    "Fleet",
    "FunnelModel",
    "LoopStep",
    "Outcome",
    "Profile",
    "Query",
    "StationSpec",
    "Workload",
    "expected_gain",
    "expected_latency",
    "limit_gain",
    "simulate",
]
