"""The ways to serve requests on too few slots that the demo times against each other."""

from enum import Enum

from swapkv.demo.scenario import Mode, Scenario
from swapkv.schedulers import Handover


class Way(Enum):
    """A timed way. The value is its name."""

    SWAPPING = "swapping"
    STREAMING = "streaming"
    STOP_THE_WORLD = "stop the world"
    RECOMPUTING = "recomputing"
    CEILING = "ceiling"

    @classmethod
    def timed(cls, mode: Mode) -> tuple["Way", ...]:
        """What is timed in a mode, the way under test first."""
        if mode is Mode.STREAM:
            return cls.STREAMING, cls.SWAPPING, cls.CEILING
        return cls.SWAPPING, cls.STOP_THE_WORLD, cls.RECOMPUTING, cls.CEILING

    @property
    def mode(self) -> Mode:
        return Mode.STREAM if self is Way.STREAMING else Mode.SWAP

    @property
    def exact(self) -> bool:
        """Whether tokens and KV bytes have to be the twin's: what is recomputed rounds differently."""
        return self in (Way.SWAPPING, Way.STREAMING, Way.STOP_THE_WORLD)

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
            Way.STREAMING: f"{crowd}, all in every step; KV that does not fit is read in host memory, layer by layer",
            Way.STOP_THE_WORLD: f"{crowd}; the same copies, but all wait until they are over",
            Way.RECOMPUTING: f"{crowd}; KV is dropped and computed again, nothing is copied",
            Way.CEILING: f"only {scenario.gpu_slots} requests on {scenario.gpu_slots} slots; nobody ever has to leave",
        }[self]
