"""The production CUDA code, on a CUDA driver whose device memory is host memory, in a process of its own.

What is run there: `cudahost/suite_*.py`. Not a single line of it has seen a GPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cudahost.build import ROOT, build, run_suite

SUITES = sorted(path.name for path in (Path(__file__).parent / "cudahost").glob("suite_*.py"))


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("cudahost"))


@pytest.mark.parametrize("suite", SUITES)
def test_suite_passes_on_the_host_memory_driver(driver: Path, suite: str) -> None:
    run = run_suite(driver, suite, range(2), timeout_s=300)
    assert run.returncode == 0, run.stdout[-8000:]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("begin", range(0, 100, 10))
def test_pool_suite_passes_at_a_hundred_timing_seeds(driver: Path, begin: int) -> None:
    run = run_suite(driver, "suite_pool.py", range(begin, begin + 10), 3000, select="byte_for_byte or in_any_timing")
    assert run.returncode == 0, run.stdout[-8000:]


def test_device_without_a_driver_is_refused_with_the_remedy() -> None:
    code = "from swapkv.streams.cuda import CudaDevice\ntry:\n  CudaDevice()\nexcept Exception as e: print(type(e).__name__, e)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert "ProtocolError no CUDA driver" in run.stdout, run.stdout + run.stderr
    assert "use HostDevice" in run.stdout
