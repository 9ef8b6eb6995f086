"""The sharing doctor: where trajectories stop sharing, why, what it costs, and what would win it back.

trajectories = formats.read("rollouts.jsonl", rows="turn")
report = explain(trajectories, decoder=decoder_for("rollouts.jsonl"))
"""

from harts.explain.kinds import REMEDIES, Kind
from harts.explain.misses import Example, Miss
from harts.explain.report import Group, Report, Sizes, explain

__all__ = ["REMEDIES", "Example", "Group", "Kind", "Miss", "Report", "Sizes", "explain"]
