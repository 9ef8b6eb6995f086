"""Training on trees: a config, one step, a trainer."""

from harts.train.config import TrainConfig
from harts.train.trainer import Interrupted, Trainer

__all__ = ["Interrupted", "TrainConfig", "Trainer"]
