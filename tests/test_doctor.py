"""`swapkv doctor`: what is there, what is missing, and an exit status that scripts can trust."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from swapkv import doctor
from swapkv.cli import main
from swapkv.doctor import Finding, Subject, examine, lacking
from tests.cudahost.build import ROOT, build


def words(findings: list[Finding], subject: Subject) -> str:
    return "\n".join(finding.words for finding in findings if finding.subject is subject)


def test_without_a_gpu_it_says_what_is_missing_and_what_helps() -> None:
    findings = examine()
    assert {finding.subject for finding in findings} == set(Subject)
    assert "GB/s out" in words(findings, Subject.HOST)
    assert "RLIMIT_MEMLOCK" in words(findings, Subject.MEMORY)
    cuda = [finding for finding in findings if finding.subject is Subject.CUDA]
    assert [finding.missing for finding in cuda] == [True]
    assert "install the NVIDIA driver, or use HostDevice" in cuda[0].words


def test_on_a_cuda_driver_it_names_devices_and_the_way_they_copy(tmp_path: Path) -> None:
    environment = os.environ | {"LD_LIBRARY_PATH": str(build(tmp_path))}
    command = [sys.executable, "-c", "from swapkv.cli import main; main()", "doctor", "--require", "cuda", "--json"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    found = [f["words"] for f in json.loads(run.stdout)["findings"] if f["subject"] == "cuda"]
    assert found[0].startswith("2 devices")
    assert len(found) == 3
    assert all("GB/s" in line and "32 KiB" in line for line in found[1:])


def test_what_is_required_and_missing_decides_the_exit_status() -> None:
    fine = CliRunner().invoke(main, ["doctor", "--require", "host", "--require", "memory"])
    assert fine.exit_code == 0
    assert "--  cuda" in fine.stdout
    lacks = CliRunner().invoke(main, ["doctor", "--require", "cuda", "--json"])
    assert lacks.exit_code == 1
    assert len(json.loads(lacks.stdout)["lacking"]) == 1


def test_mooncake_master_that_answers_is_found_and_one_that_does_not_is_missing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert f"something listens at {address}" in words(examine(mooncake=address), Subject.MOONCAKE)
    findings = examine(mooncake=address)
    assert f"nothing answers at {address}" in words(lacking(findings, [Subject.MOONCAKE]), Subject.MOONCAKE)
    assert CliRunner().invoke(main, ["doctor", "--mooncake", address]).exit_code == 1


@pytest.mark.parametrize("address", ["nowhere", "host:", ":50051", "host:port", "127.0.0.1:70000"])
def test_address_that_is_none_is_named(address: str) -> None:
    findings = lacking(examine(mooncake=address), [Subject.MOONCAKE])
    assert address in words(findings, Subject.MOONCAKE)


@pytest.fixture
def kvikio_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: True if name == "kvikio" else find(name))


@pytest.mark.usefixtures("kvikio_found")
def test_kernel_module_of_gpudirect_storage_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "NVIDIA_FS", tmp_path / "none")
    assert "load the kernel module nvidia-fs" in words(lacking(examine(), [Subject.GDS]), Subject.GDS)
    monkeypatch.setattr(doctor, "NVIDIA_FS", tmp_path)
    assert not lacking(examine(), [Subject.GDS])


def test_gpudirect_storage_that_was_asked_for_and_is_not_installed_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "kvikio" else find(name))
    run = CliRunner().invoke(main, ["doctor", "--gds", str(tmp_path)])
    assert run.exit_code == 1
    assert "--  gds       kvikio is not installed: pip install 'swapkv[gds]'" in run.stdout


@pytest.mark.usefixtures("kvikio_found")
def test_gpudirect_storage_without_a_gpu_is_missing_with_the_reason(tmp_path: Path) -> None:
    run = CliRunner().invoke(main, ["doctor", "--gds", str(tmp_path)])
    assert run.exit_code == 1
    assert f"--  gds       device 0 and {tmp_path}: no CUDA driver" in run.stdout
    assert CliRunner().invoke(main, ["doctor", "--gds", str(tmp_path / "none")]).exit_code == 2


def gds_on_driver(tmp_path: Path, before: str) -> tuple[int, str]:
    """`swapkv doctor --gds` on the driver of the tests: its exit status and what it says of GDS."""
    (tmp_path / "driver").mkdir()
    (tmp_path / "disk").mkdir()
    environment = os.environ | {"LD_LIBRARY_PATH": str(build(tmp_path / "driver"))}
    code = "\n".join(
        [
            "from tests.cudahost import control",
            before,
            "import swapkv.streams.cuda",
            "swapkv.streams.cuda.view_on_device = control.view_on_host",
            "from swapkv.cli import main",
            "main()",
        ]
    )
    command = [sys.executable, "-c", code, "doctor", "--gds", str(tmp_path / "disk"), "--json"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert list((tmp_path / "disk").iterdir()) == [], "nothing is left behind"
    (finding,) = [f for f in json.loads(run.stdout)["findings"] if f["subject"] == "gds"]
    return run.returncode, finding["words"]


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed: `make test` does that")
def test_disk_that_bytes_are_bounced_to_is_missing_with_the_reason_and_what_it_does_all_the_same(
    tmp_path: Path,
) -> None:
    status, said = gds_on_driver(tmp_path, "")
    assert status == 1
    assert "bounced, ordered by the host (kvikio " in said
    assert "load the kernel module nvidia-fs" in said
    assert "GB/s out" in said


@pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed: `make test` does that")
def test_disk_that_the_device_reaches_directly_is_found(tmp_path: Path) -> None:
    before = (
        "from tests.cudahost import gds_driver\nfrom pathlib import Path\n"
        "from swapkv.tiers import gds_kvikio\ngds_kvikio.NVIDIA_FS = Path('/')"
    )
    status, said = gds_on_driver(tmp_path, before)
    assert status == 0, said
    assert "direct, ordered by the stream (kvikio " in said
