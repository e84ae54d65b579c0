"""The ways to serve requests on too few slots that the demo times against each other."""

from enum import Enum

from swapkv.demo.scenario import Scenario
from swapkv.schedulers import Handover


class Way(Enum):
    """A timed way. The value is its name."""

    SWAPPING = "swapping"
    STOP_THE_WORLD = "stop the world"
    RECOMPUTING = "recomputing"
    CEILING = "ceiling"

    @property
    def handover(self) -> Handover:
        """How requests make room for each other; nobody has to at the ceiling."""
        handovers = {Way.STOP_THE_WORLD: Handover.STOP_THE_WORLD, Way.RECOMPUTING: Handover.RECOMPUTE}
        return handovers.get(self, Handover.SWAP)

    def requests(self, scenario: Scenario) -> int:
        """How many of the requests run."""
        return scenario.gpu_slots if self is Way.CEILING else scenario.requests

    def what(self, scenario: Scenario) -> str:
        """What it is, for a reader who sees it for the first time."""
        crowd = f"{scenario.requests} requests on {scenario.gpu_slots} slots"
        return {
            Way.SWAPPING: f"{crowd}; KV leaves and comes back while the others run",
            Way.STOP_THE_WORLD: f"{crowd}; the same copies, but all wait until they are over",
            Way.RECOMPUTING: f"{crowd}; KV is dropped and computed again, nothing is copied",
            Way.CEILING: f"only {scenario.gpu_slots} requests on {scenario.gpu_slots} slots; nobody ever has to leave",
        }[self]
