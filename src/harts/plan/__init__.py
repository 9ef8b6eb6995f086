"""Trees + budget + replicas -> Plan: microbatches on slots and replicas. Pure functions, no torch."""

from harts.plan.check import check_microbatch, check_plan
from harts.plan.make import lower_bound, make_plan
from harts.plan.schedule import Microbatch, Plan

__all__ = ["Microbatch", "Plan", "check_microbatch", "check_plan", "lower_bound", "make_plan"]
