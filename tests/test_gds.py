"""The GDS tier without what it needs. With it: `cudahost/suite_gds*.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

from swapkv.streams.host import HostDevice
from swapkv.tiers.gds import GdsSlab
from tests.cudahost.build import ROOT
from tests.kit.slab import fetch, opened, options_of, stamped, write_of


def test_tier_is_imported_without_its_extra() -> None:
    code = "import sys\nfor name in ('kvikio', 'cuda'): sys.modules[name] = None\nimport swapkv, swapkv.tiers.gds, swapkv.doctor"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, text=True, capture_output=True, timeout=120)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (None, r"GPUDirect Storage needs an extra: pip install 'swapkv\[gds\]'"),
        (
            RuntimeError("no libcufile.so.0"),
            r"cannot be loaded \(no libcufile.so.0\): pip install 'swapkv\[gds\]' again",
        ),
    ],
    ids=["not installed", "broken"],
)
def test_opening_it_without_its_extra_names_the_extra_and_leaves_the_slab(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, said: str
) -> None:
    monkeypatch.delitem(sys.modules, "swapkv.tiers.gds_kvikio", raising=False)
    if error is None:
        monkeypatch.setitem(sys.modules, "kvikio", None)
    else:
        monkeypatch.delitem(sys.modules, "kvikio", raising=False)
        monkeypatch.setattr(sys, "meta_path", [Broken(error), *sys.meta_path])
    with opened(tmp_path / "slab", options_of()) as slab:
        with pytest.raises(ImportError, match=said):
            GdsSlab(slab, HostDevice())
        slab.begin_write(write_of(1, 1, 100)).result(20)
        assert fetch(slab, 1) == stamped(1, 1, 100)


class Broken:
    """What finds kvikio, which fails while it is loaded."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name == "kvikio":
            raise self.error
