"""Schedulers, and the reference engine loop that runs them. `base` is what a scheduler of your own needs."""

from swapkv.schedulers.base import Phase, Plan, RequestView, Scheduler
from swapkv.schedulers.request import Request
from swapkv.schedulers.round_robin import RoundRobin, VictimOrder
from swapkv.schedulers.runner import BatchRow, Handover, Model, Runner
from swapkv.schedulers.streaming import StreamRunner

__all__ = [
    "BatchRow",
    "Handover",
    "Model",
    "Phase",
    "Plan",
    "Request",
    "RequestView",
    "RoundRobin",
    "Runner",
    "Scheduler",
    "StreamRunner",
    "VictimOrder",
]
