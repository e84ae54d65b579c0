"""Builds the driver, and runs Python on it: in a process of its own, where cuda-python finds it as libcuda.so.1."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ("host.c", "streams.c", "control.c")
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-pthread", "-Wl,-soname,libcuda.so.1")
SEEDS = "CUDAHOST_SEEDS"


def build(folder: Path) -> Path:
    """Compile `libcuda.so.1` into `folder` and return the folder."""
    target = folder / "libcuda.so.1"
    command = [os.environ.get("CC", "cc"), *FLAGS, "-o", str(target), *(str(HERE / name) for name in SOURCES), "-ldl"]
    subprocess.run(command, check=True, timeout=120)
    return folder


def run_suite(
    driver: Path, name: str, seeds: range, timeout_s: float, select: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a suite of this folder on the driver, with pytest: those tests that `select` names, with these timing seeds."""
    environment = os.environ | {"LD_LIBRARY_PATH": str(driver), SEEDS: f"{seeds.start}-{seeds.stop}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-k", select, str(HERE / name)]
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=timeout_s,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
