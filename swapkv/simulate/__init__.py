"""The production core in virtual time."""

from swapkv.simulate.copier import VirtualCopier

__all__ = ["VirtualCopier"]
