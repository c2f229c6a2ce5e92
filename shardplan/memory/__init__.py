"""What a device holds while it runs a schedule: other packages import it from here alone."""

from shardplan.memory.kernels import whole_kernels as whole_kernels
from shardplan.memory.lifetimes import Lifetimes as Lifetimes
from shardplan.memory.model import lifetimes_of as lifetimes_of
