"""What a microbatch costs: counts of rows, the FLOPs they need, and coefficients fitted from timed runs.

The counts are those of one forward and backward; every cost is a sum of non-negative coefficients times counts.
"""

from harts.cost.config import forward_flops, model_identity
from harts.cost.counts import (
    Coefficients,
    Counts,
    count,
    count_paths,
    count_shared,
    count_trained_rows,
    leaf_paths,
    trained_rows_by,
    visible_pairs,
)
from harts.cost.experts import Experts, expert_sizes
from harts.cost.model import CostModel, TimedRun
from harts.cost.recurrent import Mamba2Sizes, mamba2_sizes

__all__ = [
    "Coefficients",
    "CostModel",
    "Counts",
    "Experts",
    "Mamba2Sizes",
    "TimedRun",
    "count",
    "count_paths",
    "count_shared",
    "count_trained_rows",
    "expert_sizes",
    "forward_flops",
    "leaf_paths",
    "mamba2_sizes",
    "model_identity",
    "trained_rows_by",
    "visible_pairs",
]
