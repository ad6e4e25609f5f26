"""What a model needs and what of it fits: the arithmetic behind `antiphon plan`.

From a model's config.json and the memory of some GPUs to shapes: how many parameters each rank of a replica holds, how
many bytes a token's KV takes there, how many blocks are left, and which shape to take, with the reason. Pure functions
over plain records: no torch, no file is read, nothing is loaded. Which shapes are possible at all is decided in
`antiphon_engine.parallel`, by the code that workers ask too.
"""

from antiphon_engine.planning.configuration import (
    DEMO_CONFIG,
    ConfigRefused,
    ModelConfig,
    read_config,
)
from antiphon_engine.planning.devices import DEVICES, Device, DeviceRefused, Fleet, read_fleet
from antiphon_engine.planning.memory import Reserve, ShapeMemory, shape_memory
from antiphon_engine.planning.parameters import count_parameters, rank_parameters
from antiphon_engine.planning.shapes import Plan, PlannedShape, Question, QuestionRefused, plan_shapes

__all__ = [
    "DEMO_CONFIG",
    "DEVICES",
    "ConfigRefused",
    "Device",
    "DeviceRefused",
    "Fleet",
    "ModelConfig",
    "Plan",
    "PlannedShape",
    "Question",
    "QuestionRefused",
    "Reserve",
    "ShapeMemory",
    "count_parameters",
    "plan_shapes",
    "rank_parameters",
    "read_config",
    "read_fleet",
    "shape_memory",
]
