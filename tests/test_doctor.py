"""`swapkv doctor`: what is there, what is missing, and an exit status that scripts can trust."""

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


def test_kernel_module_of_gpudirect_storage_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: True if name == "kvikio" else find(name))
    monkeypatch.setattr(doctor, "NVIDIA_FS", tmp_path / "none")
    assert "load the kernel module nvidia-fs" in words(lacking(examine(), [Subject.GDS]), Subject.GDS)
    monkeypatch.setattr(doctor, "NVIDIA_FS", tmp_path)
    assert not lacking(examine(), [Subject.GDS])
