"""Scaling as a pure function: what was measured goes in, sizes of pools with their reason come out."""

from antiphon_policy.scaling.assembly import ModelSetup, PoolSetup, WorkerFigures, merged
from antiphon_policy.scaling.forecast import Forecast, forecast
from antiphon_policy.scaling.history import History
from antiphon_policy.scaling.law import decide
from antiphon_policy.scaling.news import (
    MOST_NEWS_SAMPLES,
    GatewayNews,
    PoolNews,
    ScalingNewsError,
    WorkerNews,
    decode_news,
    encode_news,
)
from antiphon_policy.scaling.records import (
    MOST_SAMPLES,
    ArrivalCounts,
    PoolMemory,
    PoolSize,
    PoolView,
    Prediction,
    Promise,
    RequestSample,
    RoleSwitch,
    ScalingAction,
    ScalingDecision,
    ScalingInputs,
    ScalingMemory,
    ScalingReason,
    TpotTarget,
    TtftTarget,
    Wanted,
)
from antiphon_policy.scaling.work import is_feasible

__all__ = [
    "MOST_NEWS_SAMPLES",
    "MOST_SAMPLES",
    "ArrivalCounts",
    "Forecast",
    "GatewayNews",
    "History",
    "ModelSetup",
    "PoolMemory",
    "PoolNews",
    "PoolSetup",
    "PoolSize",
    "PoolView",
    "Prediction",
    "Promise",
    "RequestSample",
    "RoleSwitch",
    "ScalingAction",
    "ScalingDecision",
    "ScalingInputs",
    "ScalingMemory",
    "ScalingNewsError",
    "ScalingReason",
    "TpotTarget",
    "TtftTarget",
    "Wanted",
    "WorkerFigures",
    "WorkerNews",
    "decide",
    "decode_news",
    "encode_news",
    "forecast",
    "is_feasible",
    "merged",
]
