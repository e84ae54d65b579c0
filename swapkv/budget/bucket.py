"""A token bucket over bytes, in whole numbers, so that the same calls give the same answers."""

from swapkv.config import SECOND_NS


class TokenBucket:
    """Lets through `rate` bytes/s on average and `burst` bytes at once; a rate of None lets everything through.

    A single take larger than the burst waits for a full bucket and leaves a debt, so the average still holds.
    Conserved: what was taken minus what was given back is what was sent (`sent_bytes`).
    """

    def __init__(self, rate: int | None, burst: int, now_ns: int = 0) -> None:
        self.rate = rate
        self.burst = burst
        self.sent_bytes = 0
        self._level = burst * SECOND_NS
        self._filled_ns = now_ns

    def take(self, num_bytes: int, now_ns: int) -> bool:
        """Take `num_bytes` if they are there."""
        self._fill(now_ns)
        if self.rate is not None:
            if self._level < min(num_bytes, self.burst) * SECOND_NS:
                return False
            self._level -= num_bytes * SECOND_NS
        self.sent_bytes += num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        """Return bytes that were taken for a copy that never started."""
        assert num_bytes <= self.sent_bytes, (num_bytes, self.sent_bytes)
        self.sent_bytes -= num_bytes
        if self.rate is not None:
            self._level = min(self._level + num_bytes * SECOND_NS, self.burst * SECOND_NS)

    def ready_ns(self, num_bytes: int, now_ns: int) -> int:
        """The earliest time at which `take(num_bytes)` succeeds if nobody else takes."""
        self._fill(now_ns)
        missing = min(num_bytes, self.burst) * SECOND_NS - self._level
        if self.rate is None or missing <= 0:
            return now_ns
        return now_ns - -missing // self.rate

    def fill_share(self, now_ns: int) -> float | None:
        """How full the bucket is, 0 to 1; None when it has no limit."""
        if self.rate is None:
            return None
        self._fill(now_ns)
        return max(0, self._level) / (self.burst * SECOND_NS)

    def _fill(self, now_ns: int) -> None:
        elapsed = now_ns - self._filled_ns
        if elapsed <= 0:
            return
        self._filled_ns = now_ns
        if self.rate is not None:
            self._level = min(self._level + elapsed * self.rate, self.burst * SECOND_NS)
