"""A replica of several ranks: processes that Ray places and starts, and steps that never pass through Ray.

Four kinds of processes, each with one task. The *driver* is the worker: it plans steps and owns block numbers
(`GangExecutor`). A *rank* computes its part of every step on one device (`rank`). Between them are plain sockets
(`channel`, `messages`). Ray lives in two helper processes that the worker starts and can always kill: one keeps the Ray
node of this machine (`node`, for as long as the worker lives), one is Ray's driver and has the ranks placed, started
and watched (`placer`, once for each life of the gang). So a Ray that hangs, or leaves processes behind, is never inside
the worker; and whatever way the worker ends, the helpers see their pipe close and clear up.
"""

from antiphon_engine.gang.cluster import ClusterKind, ClusterSettings, RayCluster
from antiphon_engine.gang.errors import GangStartError, GangStopped, GangUnschedulable
from antiphon_engine.gang.executor import GangExecutor
from antiphon_engine.gang.join import join_cluster
from antiphon_engine.gang.placement import NodeRoom, Wanted, why_unschedulable
from antiphon_engine.gang.start import GangSettings

__all__ = [
    "ClusterKind",
    "ClusterSettings",
    "GangExecutor",
    "GangSettings",
    "GangStartError",
    "GangStopped",
    "GangUnschedulable",
    "NodeRoom",
    "RayCluster",
    "Wanted",
    "join_cluster",
    "why_unschedulable",
]
