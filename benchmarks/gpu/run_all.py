"""Every check and benchmark that needs a GPU, in a few minutes: `python -m benchmarks.gpu.run_all [--json FILE]`.

Prints a table and writes a JSON file with date, card, driver and versions. Exits with 1 if a check failed or a figure is
below what is asked, with 2 if there is no GPU. Needs the repository on PYTHONPATH, torch, cuda-python and what swapkv
itself needs; transformers and Triton for what is measured of them, and NVRTC (torch's wheels have it) for the copy kernel. A
part that raises is reported as failed, and the others go on. Rows are printed and written as they come: a hang loses none.
"""

import argparse
import json
import platform
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import attrs
import torch

from benchmarks.gpu import checks, compute, copies, latency, offloaded, streaming
from benchmarks.gpu.rows import MakeDevice, Part, Row
from swapkv.errors import SwapError
from swapkv.streams.cuda import CudaDevice

ANYWHERE: Sequence[Part] = (
    checks.every_way,
    checks.round_trips,
    checks.reuse_after_cancel,
    checks.every_call,
    copies.bandwidth,
    latency.swaps,
    streaming.streamed_attention,
    offloaded.offloaded_cache,
)
"""Parts that run on any CUDA driver."""

ON_A_GPU: Sequence[Part] = (compute.overlap, compute.decode_kernel, compute.gates)
"""Parts that launch kernels."""

PACKAGES = ("torch", "triton", "transformers", "cuda-bindings", "cuda-core", "nvidia-cuda-nvrtc", "swapkv")

LIMIT_S = 330.0
"""No part begins after this."""


def run(parts: Sequence[Part], make: MakeDevice, limit_s: float = LIMIT_S) -> Iterator[Row]:
    """Run the parts in turn."""
    begin_s = time.monotonic()
    for part in parts:
        name = part.__name__
        if time.monotonic() - begin_s > limit_s:
            yield Row(name, f"not run: {limit_s:.0f} s were over", "skipped", ok=False)
            continue
        part_s = time.monotonic()
        try:
            yield from part(make)
        except Exception as error:
            traceback.print_exc()
            yield Row(name, f"{type(error).__name__}: {error}", "FAILED", ok=False)
        yield Row(name, "took", time.monotonic() - part_s, "s")


def machine() -> dict[str, str]:
    """What the figures are of."""
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": properties.name,
        "memory": f"{properties.total_memory >> 20} MiB",
        "cuda": str(torch.version.cuda),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def print_table(rows: Sequence[Row]) -> None:
    for row in rows:
        mark = {None: "  ", True: "ok", False: "!!"}[row.ok]
        value = f"{row.value:.3f}" if isinstance(row.value, float) else row.value
        print(f"{mark}  {row.part:<20} {row.what:<70} {value:>10} {row.unit}", flush=True)


def write_json(file: Path, about: dict[str, str], rows: Sequence[Row]) -> None:
    file.write_text(json.dumps({"machine": about, "rows": [attrs.asdict(row) for row in rows]}, indent=2) + "\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    try:
        CudaDevice().close(10.0)
    except SwapError as error:
        print(f"no GPU: {error}", file=sys.stderr)
        return 2
    about, rows = machine(), []
    for row in run([*ANYWHERE, *ON_A_GPU], CudaDevice):
        rows.append(row)
        print_table([row])
        if options.json is not None:
            write_json(options.json, about, rows)
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
