"""What a world raises when the core has broken a promise."""


class Violation(AssertionError):  # noqa: N818
    """The core did, or let happen, what must never happen."""
