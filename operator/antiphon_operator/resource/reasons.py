"""Every condition that a Model's status may have, and every reason that a condition or a pool may give.

Machines read the reason; people read the message. Each reason has its meaning here and in the reference page, so a
new one is a line here and nothing else. The CRD leaves the set open: an older client must be able to read the status
that a newer operator wrote.
"""

from __future__ import annotations

from enum import StrEnum


class ConditionType(StrEnum):
    """Conditions of a Model."""

    READY = "Ready"
    SOURCE_READY = "SourceReady"
    POOLS_READY = "PoolsReady"
    TRANSFER_READY = "TransferReady"
    GATEWAY_READY = "GatewayReady"
    ROLLOUT_COMPLETE = "RolloutComplete"
    UPDATE_AVAILABLE = "UpdateAvailable"
    SCALING_LIMITED = "ScalingLimited"


CONDITION_MEANINGS: dict[ConditionType, str] = {
    ConditionType.READY: "A request to the Model's name is answered now.",
    ConditionType.SOURCE_READY: "The weights were found, and are where the pods can read them.",
    ConditionType.POOLS_READY: "Both pools have as many ready replicas as they should.",
    ConditionType.TRANSFER_READY: "KV blocks travel from prefill to decode as the Model asks.",
    ConditionType.GATEWAY_READY: "Every gateway knows the Model and has a stream with its workers.",
    ConditionType.ROLLOUT_COMPLETE: "All replicas are of the current revision.",
    ConditionType.UPDATE_AVAILABLE: "This operator would render the pods otherwise than they are; nothing was changed.",
    ConditionType.SCALING_LIMITED: "The promise needs more replicas than bounds and budget allow. Only with the modes "
    "Advise and Enforce.",
}


class Phase(StrEnum):
    """One word for people. Nothing decides by it."""

    PENDING = "Pending"
    STARTING = "Starting"
    RUNNING = "Running"
    ROLLING_OUT = "RollingOut"
    DEGRADED = "Degraded"
    SLEEPING = "Sleeping"
    REFUSED = "Refused"


class Reason(StrEnum):
    """Why a condition or a pool is as it is."""

    # the Model as a whole
    SERVING = "Serving"
    STARTING = "Starting"
    DEGRADED = "Degraded"
    NOT_SERVING = "NotServing"
    SCALED_TO_ZERO = "ScaledToZero"
    SPEC_REFUSED = "SpecRefused"
    NAME_CONFLICT = "NameConflict"
    WAITING = "Waiting"
    APPLY_FAILED = "ApplyFailed"
    INTERNAL_ERROR = "InternalError"
    # the weights
    AVAILABLE = "Available"
    RESOLVING = "Resolving"
    FETCHING = "Fetching"
    CLAIM_NOT_FOUND = "ClaimNotFound"
    CLAIM_NOT_SHAREABLE = "ClaimNotShareable"
    SOURCE_NOT_FOUND = "SourceNotFound"
    SOURCE_FORBIDDEN = "SourceForbidden"
    SOURCE_FAILED = "SourceFailed"
    # pods
    ALL_READY = "AllReady"
    SCALING = "Scaling"
    DRAINING = "Draining"
    INSUFFICIENT_GPUS = "InsufficientGpus"
    INSUFFICIENT_RESOURCES = "InsufficientResources"
    UNSCHEDULABLE = "Unschedulable"
    QUOTA_EXCEEDED = "QuotaExceeded"
    POD_REFUSED = "PodRefused"
    POD_SECURITY = "PodSecurity"
    IMAGE_PULL = "ImagePull"
    CONFIG_MISSING = "ConfigMissing"
    VOLUME_NOT_READY = "VolumeNotReady"
    ENGINE_CRASH = "EngineCrash"
    OUT_OF_MEMORY = "OutOfMemory"
    EVICTED = "Evicted"
    NODE_LOST = "NodeLost"
    GANG_UNSCHEDULABLE = "GangUnschedulable"
    GANG_INCOMPLETE = "GangIncomplete"
    BACKING_OFF = "BackingOff"
    # transfer
    CONNECTED = "Connected"
    NOT_NEEDED = "NotNeeded"
    TCP_FALLBACK = "TcpFallback"
    NEEDS_PRIVILEGED_NAMESPACE = "NeedsPrivilegedNamespace"
    # gateways
    ALL_GATEWAYS = "AllGateways"
    SOME_GATEWAYS = "SomeGateways"
    NO_GATEWAY = "NoGateway"
    GATEWAY_UNREACHABLE = "GatewayUnreachable"
    NOT_CONFIGURED = "NotConfigured"
    # rollout and updates
    COMPLETE = "Complete"
    IN_PROGRESS = "InProgress"
    PAUSED = "Paused"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    UP_TO_DATE = "UpToDate"
    NEW_TEMPLATES = "NewTemplates"
    # the autoscaler
    WITHIN_LIMITS = "WithinLimits"
    CEILING = "Ceiling"
    BUDGET = "Budget"
    NO_NEWS = "NoNews"


REASON_MEANINGS: dict[Reason, str] = {
    Reason.SERVING: "Requests are answered.",
    Reason.STARTING: "The first replicas are coming up.",
    Reason.DEGRADED: "Requests are answered by fewer replicas than there should be.",
    Reason.NOT_SERVING: "No replica, or no pair of replicas, can answer a request; the message says why.",
    Reason.SCALED_TO_ZERO: "There are no replicas, as asked for; a request wakes the Model.",
    Reason.SPEC_REFUSED: "The spec asks for something that cannot be; the message says what to change.",
    Reason.NAME_CONFLICT: "An older Model has one of the names; its workers serve it and this Model starts none.",
    Reason.WAITING: "Something else has to happen first; the message says what.",
    Reason.APPLY_FAILED: "The API server refused one of the Model's objects; the message has its words.",
    Reason.INTERNAL_ERROR: "The operator failed on this Model; its pods are left as they are, and it tries again.",
    Reason.AVAILABLE: "The weights are where the pods can read them.",
    Reason.RESOLVING: "The revision of the repository is being looked up.",
    Reason.FETCHING: "The weights are being fetched into the claim.",
    Reason.CLAIM_NOT_FOUND: "There is no such PersistentVolumeClaim in the namespace.",
    Reason.CLAIM_NOT_SHAREABLE: "The claim can be mounted by one node only.",
    Reason.SOURCE_NOT_FOUND: "There is no such repository or revision.",
    Reason.SOURCE_FORBIDDEN: "The repository needs a token, or another one.",
    Reason.SOURCE_FAILED: "Looking up or fetching failed; it is tried again.",
    Reason.ALL_READY: "All replicas are ready.",
    Reason.SCALING: "Replicas are being added.",
    Reason.DRAINING: "Replicas are finishing their requests before they go.",
    Reason.INSUFFICIENT_GPUS: "No node has as many free devices.",
    Reason.INSUFFICIENT_RESOURCES: "No node has as much free CPU, memory or storage.",
    Reason.UNSCHEDULABLE: "No node fits for another reason: taints, affinity, node selector.",
    Reason.QUOTA_EXCEEDED: "A ResourceQuota of the namespace refuses the pods.",
    Reason.POD_REFUSED: "The API server or an admission policy refuses the pods.",
    Reason.POD_SECURITY: "The namespace's pod security level refuses the pods.",
    Reason.IMAGE_PULL: "The image cannot be pulled.",
    Reason.CONFIG_MISSING: "A Secret or ConfigMap that the pods need is missing.",
    Reason.VOLUME_NOT_READY: "A volume cannot be attached or mounted.",
    Reason.ENGINE_CRASH: "The worker's process ended; the message has the last line of its log.",
    Reason.OUT_OF_MEMORY: "The worker used more memory than its limit.",
    Reason.EVICTED: "The node put the pod out.",
    Reason.NODE_LOST: "A node is gone or does not answer; its replicas are replaced.",
    Reason.GANG_UNSCHEDULABLE: "A replica's ranks find no place in its pods; the message says which bundle lacks what.",
    Reason.GANG_INCOMPLETE: "Not all pods of a replica came up in time; it was taken down whole.",
    Reason.BACKING_OFF: "The next try waits, because the ones before failed.",
    Reason.CONNECTED: "Workers are connected as the Model asks.",
    Reason.NOT_NEEDED: "Aggregated serving: no KV block has to travel between pools.",
    Reason.TCP_FALLBACK: "A link uses TCP although RDMA was asked for or possible.",
    Reason.NEEDS_PRIVILEGED_NAMESPACE: "RDMA pods lock memory, which the namespace's pod security level refuses.",
    Reason.ALL_GATEWAYS: "Every gateway has a stream with the workers.",
    Reason.SOME_GATEWAYS: "Some gateways have no stream with the workers yet.",
    Reason.NO_GATEWAY: "No gateway is running.",
    Reason.GATEWAY_UNREACHABLE: "A gateway does not answer the operator.",
    Reason.NOT_CONFIGURED: "The operator was told of no gateway.",
    Reason.COMPLETE: "All replicas are of the current revision.",
    Reason.IN_PROGRESS: "Replicas of the new revision are coming up beside the old.",
    Reason.PAUSED: "The rollout is paused by spec.rollout.paused.",
    Reason.PROGRESS_DEADLINE_EXCEEDED: "A step was not ready in time and was taken down; the old revision serves.",
    Reason.UP_TO_DATE: "The pods are as this operator renders them.",
    Reason.NEW_TEMPLATES: "This operator renders the pods otherwise; the message says how to take that over.",
    Reason.WITHIN_LIMITS: "Bounds and budget allow what the promise needs.",
    Reason.CEILING: "A pool has as many replicas as its bounds allow, and needs more.",
    Reason.BUDGET: "The pools have as many devices as spec.autoscaling.gpuBudget allows, and need more.",
    Reason.NO_NEWS: "No gateway has told anything lately, so sizes stay as they are.",
}
