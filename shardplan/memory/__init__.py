"""The memory model: the live buffers of a device that runs a schedule. Other packages import it only from here."""

from shardplan.memory.kernels import whole_kernels as whole_kernels
from shardplan.memory.lifetimes import Buffer as Buffer
from shardplan.memory.lifetimes import Lifetimes as Lifetimes
from shardplan.memory.model import lifetimes_of as lifetimes_of
