"""shardplan plans how a JAX program is split over a mesh of GPUs.

step = shardplan.auto(train_step, mesh)      # instead of jax.jit(train_step)
state, loss = step(state, batch)
"""

from shardplan.audit import audit as audit
from shardplan.auto import auto as auto
from shardplan.auto import plan as plan
from shardplan.calibrate import calibrate as calibrate
from shardplan.compare import Comparison as Comparison
from shardplan.compare import compare as compare
from shardplan.control import trip_count as trip_count
from shardplan.errors import ArgumentError as ArgumentError
from shardplan.errors import CallError as CallError
from shardplan.errors import InfeasibleError as InfeasibleError
from shardplan.errors import PlanMismatchError as PlanMismatchError
from shardplan.errors import ShardplanError as ShardplanError
from shardplan.errors import ShardplanWarning as ShardplanWarning
from shardplan.plan import Plan as Plan
from shardplan.rules import describe as describe
from shardplan.simulate import Simulation as Simulation
from shardplan.simulate import simulate as simulate
