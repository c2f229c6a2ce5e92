"""The tests run on 8 emulated CPU devices. JAX reads these variables when it is first imported, so they come first."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# Most of a quick test is compiling for the CPU what runs for a moment: code that is not optimised takes a third less.
_ours = {"--xla_force_host_platform_device_count": 8, "--xla_backend_optimization_level": 0}
_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if flag.split("=")[0] not in _ours]
os.environ["XLA_FLAGS"] = " ".join([*_flags, *(f"{name}={value}" for name, value in _ours.items())])

# The emulated devices stand for GPUs; the tests of a mesh's own profile take this variable out.
os.environ["SHARDPLAN_HARDWARE"] = "h100"

# Plans are not kept by tests: those of the cache name a folder of their own.
os.environ["SHARDPLAN_CACHE_DIR"] = ""
