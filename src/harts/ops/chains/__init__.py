"""What every recurrence along chains shares: blocks and their slots, boundaries where states change hands, order."""

from harts.ops.chains.levels import Levels, levels
from harts.ops.chains.order import ChainOrder, backward_order, chain_order, forward_order
from harts.ops.chains.schedule import OutsideReads, Schedule, blocks_of, outside_reads, schedule

__all__ = [
    "ChainOrder",
    "Levels",
    "OutsideReads",
    "Schedule",
    "backward_order",
    "blocks_of",
    "chain_order",
    "forward_order",
    "levels",
    "outside_reads",
    "schedule",
]
