"""What plans minimise: one class an objective, by the name that users give."""

from collections.abc import Mapping
from types import MappingProxyType

from shardplan.layout.objectives.bytes_sent import BytesSent
from shardplan.layout.objectives.prices import Prices as Prices
from shardplan.layout.objectives.prices import Timing as Timing
from shardplan.layout.objectives.step_seconds import StepSeconds

OBJECTIVES: Mapping[str, type[Prices]] = MappingProxyType({"bytes": BytesSent, "time": StepSeconds})
"""How each is searched is said in `shardplan.optimize.searches`."""
