"""Builds the driver, and runs Python on it: in a process of its own, where cuda-python finds it as libcuda.so.1."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCES = ("host.c", "streams.c", "kernel.c", "control.c", "kvikio.c")
KERNEL = ROOT / "swapkv" / "streams" / "cuda_kernel.cu"
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-fPIC", "-shared", "-pthread")
NAMED = "-Wl,-soname,libcuda.so.1"
SEEDS = "CUDAHOST_SEEDS"


def build(folder: Path) -> Path:
    """Compile `libcuda.so.1` into `folder`, which is `libnvrtc.so.13`, too, and return the folder."""
    target = folder / "libcuda.so.1"
    sources = [str(HERE / name) for name in SOURCES]
    command = [
        os.environ.get("CC", "cc"),
        *FLAGS,
        NAMED,
        f'-DKERNEL_SOURCE="{KERNEL}"',
        "-o",
        str(target),
        *sources,
        "-ldl",
    ]
    subprocess.run(command, check=True, timeout=120)
    (folder / "libnvrtc.so.13").symlink_to(target.name)
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
