"""Random trees, workloads and comparisons: shipped, so that users can check their own model."""
