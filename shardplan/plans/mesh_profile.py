"""The default hardware profile of a mesh: that of its own devices.

>>> import jax
>>> profile_of(jax.sharding.AbstractMesh((8,), ("x",)))
'h100'
"""

from __future__ import annotations

import os
import re
from functools import lru_cache
from typing import Any

from jax.sharding import Mesh

from shardplan.common.progress import LOG
from shardplan.hardware import profiles
from shardplan.layout.mesh import GivenMesh, has_gpus
from shardplan.plans.pipeline import DEFAULT_HARDWARE

VARIABLE = "SHARDPLAN_HARDWARE"
"""The environment variable with the default profile of all meshes, for example for CPU devices that stand for GPUs of
another machine."""

_KINDS = {name: name.upper() for name in profiles() if name != "cpu"}
"""What the kind of a device says, by the profile of that name."""

_BY_CAPABILITY = ((10.0, "b200"), (9.0, "h100"), (4.0, "a100"), (0.0, "k80"))
"""For other GPUs of NVIDIA: the profile of the latest generation up to theirs."""


def profile_of(mesh: GivenMesh) -> str:
    """The name of the default profile of plans over a mesh."""
    given = os.environ.get(VARIABLE)
    if given:
        return given
    if not isinstance(mesh, Mesh):
        _say_default()
        return DEFAULT_HARDWARE
    device = mesh.devices.flat[0]
    return _of_device(str(device.platform), device.device_kind, _capability(device), has_gpus(mesh))


def _capability(device: Any) -> float:
    try:
        return float(getattr(device, "compute_capability", "9.0"))
    except ValueError:
        return 9.0


@lru_cache(maxsize=32)
def _of_device(platform: str, kind: str, capability: float, gpu: bool) -> str:
    if platform == "cpu":
        return "cpu"
    for name, model in _KINDS.items():
        if re.search(rf"\b{model}\b", kind):
            return name
    nearest = next(name for least, name in _BY_CAPABILITY if capability >= least) if gpu else DEFAULT_HARDWARE
    LOG.warning("there is no hardware profile of `%s`: %s is the nearest. Give one by hardware=", kind, nearest)
    return nearest


@lru_cache(maxsize=1)
def _say_default() -> None:
    LOG.info("a mesh without devices of its own is planned with the hardware profile %s", DEFAULT_HARDWARE)
