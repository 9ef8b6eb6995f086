"""HARTS: train hybrid-attention language models on agent trajectories that share history.

A batch of trajectories becomes a prefix tree, every distinct token runs once, forward and backward, and the
log-probabilities come back trajectory by trajectory.
"""

from harts.trajectory import Trajectory

__all__ = ["Trajectory"]
