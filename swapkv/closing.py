"""How a pool lets go of its device: within its time, also if the device's own close hangs."""

import threading

from swapkv.streams.base import Device

GRACE_S = 1.0


def close_within(device: Device, timeout_s: float) -> list[str]:
    """`Device.close`, on a thread of its own that is left behind if it has not returned `GRACE_S` after its time.

    Blocks. Returns the names of what is stuck, the device itself included; raises what `Device.close` raises.
    """
    stuck: list[str] = []
    raised: list[BaseException] = []

    def close() -> None:
        try:
            stuck.extend(device.close(timeout_s))
        except BaseException as error:  # handed on to the caller, whatever it is
            raised.append(error)

    thread = threading.Thread(target=close, name=f"swapkv-{device.name}-close", daemon=True)
    thread.start()
    thread.join(timeout_s + GRACE_S)
    if thread.is_alive():
        return [f"the close of device {device.name!r}"]
    if raised:
        raise raised[0]
    return stuck
