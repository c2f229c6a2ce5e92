"""shardplan plans how a JAX program is split over a mesh of GPUs."""
