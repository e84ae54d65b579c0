"""Reference schedulers and the engine loop that they drive."""

from swapkv.schedulers.base import Phase, Plan, RequestView, Scheduler
from swapkv.schedulers.round_robin import RoundRobin, VictimOrder
from swapkv.schedulers.runner import BatchRow, Handover, Request, Runner

__all__ = [
    "BatchRow",
    "Handover",
    "Phase",
    "Plan",
    "Request",
    "RequestView",
    "RoundRobin",
    "Runner",
    "Scheduler",
    "VictimOrder",
]
