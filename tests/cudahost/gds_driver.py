"""The tests' own cuFile, under kvikio: loaded before kvikio, which then takes no other. Import it before the GDS tier."""

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cudahost.build import HERE

OWN_ERROR = 5000 + 11
"""An error of cuFile's own, without an errno."""

_FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcufile.so.0")


def _load() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "libcufile.so.0"
        command = [os.environ.get("CC", "cc"), *_FLAGS, "-o", str(target), str(HERE / "cufile.c"), "-ldl"]
        subprocess.run(command, check=True, timeout=120)
        return ctypes.CDLL(str(target))


# kvikio serves requests on streams only where cuFile has a configuration; it looks once
os.environ["CUFILE_ENV_PATH_JSON"] = str(HERE / "cufile.c")
cufile = _load()
cufile.cufile_fail.argtypes = [ctypes.c_long, ctypes.c_int]
cufile.cufile_shorten.argtypes = [ctypes.c_size_t]
cufile.cufile_requests.restype = ctypes.c_long


def fail(nth: int, code: int) -> None:
    """The `nth` request from now fails with an errno, or an error of cuFile's own."""
    cufile.cufile_fail(nth, code)


def shorten(num_bytes: int) -> None:
    """Requests move so many bytes at most; 0: all."""
    cufile.cufile_shorten(num_bytes)


def requests() -> int:
    """How many there were."""
    return int(cufile.cufile_requests())


@contextmanager
def refusing(code: int) -> Iterator[None]:
    """cuFile takes no file."""
    cufile.cufile_configure(2, code)
    yield
    cufile.cufile_configure(2, 0)


@contextmanager
def holding() -> Iterator[None]:
    """Requests do not end within; they do afterwards."""
    cufile.cufile_hold(1)
    try:
        yield
    finally:
        cufile.cufile_hold(0)


def wait_held(count: int = 1) -> None:
    """Return once so many requests are held."""
    cufile.cufile_wait_held(count)


def reset() -> None:
    cufile.cufile_hold(0)
    fail(0, 0)
    shorten(0)
