"""The tests run on 8 emulated CPU devices. JAX reads these variables when it is first imported, so they come first."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
_flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
os.environ["XLA_FLAGS"] = " ".join([*_flags, "--xla_force_host_platform_device_count=8"])

# Plans are not kept by tests: those of the cache name a folder of their own.
os.environ["SHARDPLAN_CACHE_DIR"] = ""
