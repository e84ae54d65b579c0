"""The measured rate of a link: an exponentially weighted mean over completed copies."""

from swapkv.config import SECOND_NS


class Bandwidth:
    """Bytes per second, weighted by bytes so that many small copies do not drown a large one.

    Each copy of b bytes pulls the mean with weight 1 - 2^(-b / half_life_bytes).
    """

    def __init__(self, half_life_bytes: int = 32 << 20) -> None:
        self._half_life_bytes = half_life_bytes
        self._ns_per_byte: float | None = None

    def observe(self, num_bytes: int, elapsed_ns: int) -> None:
        """A copy of `num_bytes` took `elapsed_ns` on the link."""
        if num_bytes <= 0 or elapsed_ns <= 0:
            return
        sample = elapsed_ns / num_bytes
        if self._ns_per_byte is None:
            self._ns_per_byte = sample
            return
        weight = 1 - 2 ** (-num_bytes / self._half_life_bytes)
        self._ns_per_byte += weight * (sample - self._ns_per_byte)

    @property
    def bytes_per_s(self) -> float | None:
        """The mean so far; None before the first copy."""
        return None if self._ns_per_byte is None else SECOND_NS / self._ns_per_byte

    def cost_ns(self, num_bytes: int, assumed_bytes_per_s: float) -> float:
        """How long `num_bytes` take, by the measured rate or, before there is one, by the assumed."""
        return num_bytes * SECOND_NS / (self.bytes_per_s or assumed_bytes_per_s)
