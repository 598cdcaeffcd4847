"""`decide` over invented machines: what it says is compared with what differs between the machine
and the requirements. `detect` is compared with what this machine says of itself elsewhere.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
from pathlib import Path

import msgspec
import pytest
import torch

from m3compile import host
from m3compile.artifact import Requirements
from m3compile.config.backends import BACKENDS
from m3compile.host import Decision, Host, attention_versions, decide, detect, public_version

NEEDS = Requirements(
    torch="2.13.0",
    platform="linux-x86_64",
    cpu_flags=("avx2", "fma"),
    device="cuda",
    gpu_arch="sm_90",
    cuda="13.0",
    attention_backend="FLASH_ATTN_3",
    attention_version="fa3-fwd 0.0.3",
    op_schema="attend(q) -> o",
)
MACHINE = Host(
    torch="2.13.0",
    torch_full="2.13.0+cu130",
    platform="linux-x86_64",
    cpu_flags=("avx", "avx2", "avx512f", "fma"),
    cpu_name="Xeon",
    cuda="13.0",
    gpu_arch="sm_90",
    gpu_name="H200",
    attention_versions={"FLASH_ATTN_3": "fa3-fwd 0.0.3", "TORCH_SDPA": "torch 2.13.0"},
    op_schema="attend(q) -> o",
)
CPU_NEEDS = msgspec.structs.replace(
    NEEDS,
    device="cpu",
    gpu_arch=None,
    cuda=None,
    attention_backend="TORCH_SDPA",
    attention_version="torch 2.13.0",
)
CPU_MACHINE = msgspec.structs.replace(
    MACHINE, torch_full="2.13.0+cpu", cuda=None, gpu_arch=None, gpu_name=None
)

# What differs on the machine, and the one reason that it gives.
FAULTS: dict[str, tuple[dict[str, object], str]] = {
    "torch": ({"torch": "2.14.1"}, "built for torch 2.13.0, this machine has 2.14.1"),
    "platform": (
        {"platform": "linux-aarch64"},
        "built for platform linux-x86_64, this machine has linux-aarch64",
    ),
    "schema": (
        {"op_schema": "attend(q, k) -> o"},
        "built for attention op schema attend(q) -> o, this machine has attend(q, k) -> o",
    ),
    "flag": (
        {"cpu_flags": ("avx", "fma")},
        "built with CPU instructions avx2, this machine (Xeon) lacks them",
    ),
    "flags": (
        {"cpu_flags": ()},
        "built with CPU instructions avx2 fma, this machine (Xeon) lacks them",
    ),
    "architecture": (
        {"gpu_arch": "sm_80", "gpu_name": "A100"},
        "built for GPU sm_90, this machine has sm_80 (A100)",
    ),
    "no GPU": (
        {"gpu_arch": None, "gpu_name": None},
        "built for CUDA, this machine has no usable CUDA device",
    ),
    "cuda": ({"cuda": "12.8"}, "built for CUDA 13.0, this torch has CUDA 12.8"),
    "no attention": (
        {"attention_versions": {"TORCH_SDPA": "torch 2.13.0"}},
        "built for attention FLASH_ATTN_3 (fa3-fwd 0.0.3), which is not installed here",
    ),
    "attention": (
        {"attention_versions": {"FLASH_ATTN_3": "fa3-fwd 0.0.4"}},
        "built for attention FLASH_ATTN_3 (fa3-fwd 0.0.3), this machine has fa3-fwd 0.0.4",
    ),
    "attention of torch": (
        {"attention_versions": {"FLASH_ATTN_3": "torch 2.13.0"}},
        "built for attention FLASH_ATTN_3 (fa3-fwd 0.0.3), this machine has torch 2.13.0",
    ),
}


def changed(*names: str) -> Host:
    changes = {key: value for name in names for key, value in FAULTS[name][0].items()}
    return msgspec.structs.replace(MACHINE, **changes)


def test_the_same_machine_is_accepted() -> None:
    assert decide(NEEDS, MACHINE, "cuda") == Decision(())
    assert decide(NEEDS, MACHINE, "cuda").accepted
    assert decide(CPU_NEEDS, CPU_MACHINE, "cpu").accepted


def test_more_than_is_needed_is_accepted() -> None:
    assert decide(CPU_NEEDS, MACHINE, "cpu").accepted
    extra = msgspec.structs.replace(
        MACHINE, attention_versions={**MACHINE.attention_versions, "FLASH_ATTN_4": "x 4"}
    )
    assert decide(NEEDS, extra, "cuda").accepted


@pytest.mark.parametrize("name", FAULTS)
def test_one_difference_is_the_one_reason(name: str) -> None:
    decision = decide(NEEDS, changed(name), "cuda")
    assert decision.reasons == (FAULTS[name][1],)
    assert not decision.accepted


def differ_in_other_facts(first: str, second: str) -> bool:
    return not FAULTS[first][0].keys() & FAULTS[second][0].keys()


@pytest.mark.parametrize(
    ("first", "second"),
    [pair for pair in itertools.combinations(FAULTS, 2) if differ_in_other_facts(*pair)],
)
def test_two_differences_are_both_told(first: str, second: str) -> None:
    reasons = decide(NEEDS, changed(first, second), "cuda").reasons
    assert set(reasons) == {FAULTS[first][1], FAULTS[second][1]}


def test_everything_differs() -> None:
    names = ("torch", "platform", "schema", "flags", "architecture", "cuda", "no attention")
    reasons = decide(NEEDS, changed(*names), "cpu").reasons
    assert reasons[0] == "built for device cuda, asked to run on cpu"
    assert set(reasons[1:]) == {FAULTS[name][1] for name in names}


@pytest.mark.parametrize(("needs", "device"), [(CPU_NEEDS, "cuda"), (NEEDS, "cpu")])
def test_another_device(needs: Requirements, device: str) -> None:
    reasons = decide(needs, MACHINE, device).reasons
    assert reasons == (f"built for device {needs.device}, asked to run on {device}",)


def test_the_cpu_needs_no_gpu_and_no_cuda() -> None:
    for name in ("architecture", "no GPU", "cuda"):
        assert decide(CPU_NEEDS, changed(name), "cpu").accepted


def test_torchs_own_attention_differs_with_torch_once() -> None:
    other = msgspec.structs.replace(
        CPU_MACHINE, torch="2.14.0", attention_versions={"TORCH_SDPA": "torch 2.14.0"}
    )
    reasons = decide(CPU_NEEDS, other, "cpu").reasons
    assert reasons == ("built for torch 2.13.0, this machine has 2.14.0",)


def test_an_own_package_in_the_place_of_torchs() -> None:
    other = msgspec.structs.replace(CPU_MACHINE, attention_versions={"TORCH_SDPA": "other 1"})
    (reason,) = decide(CPU_NEEDS, other, "cpu").reasons
    assert "TORCH_SDPA (torch 2.13.0), this machine has other 1" in reason


def test_public_version() -> None:
    assert public_version("2.13.0+cu130") == "2.13.0"
    assert public_version("2.14.0a0+git1") == "2.14.0a0"
    assert public_version("2.13.0") == "2.13.0"


def test_what_is_installed_is_found_without_an_import(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"flash-attn": "2.8.3", "flash-attn-3": "3.1", "amd-aiter": "0.1"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = attention_versions("2.13.0+cpu")
    assert found == {
        "FLASH_ATTN_3": "flash-attn-3 3.1",
        "FLASH_ATTN_2": "flash-attn 2.8.3",
        "FLASH_ATTN_TORCH": "torch 2.13.0",
        "ROCM_AITER_FA": "amd-aiter 0.1",
        "TORCH_SDPA": "torch 2.13.0",
    }
    installed["fa3-fwd"] = "0.0.3"
    assert attention_versions("2.13.0")["FLASH_ATTN_3"] == "fa3-fwd 0.0.3"


def test_this_machine() -> None:
    found = detect("cpu", "schema")
    assert found.torch_full == torch.__version__
    assert found.torch_full.startswith(found.torch)
    assert found.platform == f"{platform.system()}-{platform.machine()}".lower()
    assert found.op_schema == "schema"
    assert (found.gpu_arch, found.gpu_name) == (None, None)
    assert set(found.attention_versions) <= set(BACKENDS)
    assert found.cpu_name
    assert list(found.cpu_flags) == sorted(set(found.cpu_flags))


def test_flags_that_a_compiler_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    first = "processor\t: 0\nmodel name\t: A CPU\nflags\t\t: fpu avx2 hypervisor amx_tile svm\n"
    second = "processor\t: 1\nmodel name\t: A CPU\nflags\t\t: avx512f\n"
    monkeypatch.setattr(Path, "read_text", lambda *args, **options: f"{first}\n{second}\n")
    found = detect("cpu", "schema")
    assert (found.cpu_name, found.cpu_flags) == ("A CPU", ("amx_tile", "avx2"))


def test_a_machine_without_cpuinfo(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(Path, "read_text", refuse)
    found = detect("cpu", "schema")
    assert found.cpu_flags == ()
    assert found.cpu_name


def test_every_requirement_is_decided() -> None:
    """A field that nobody compares would be a promise that nobody keeps."""
    others = {"device": "cpu", "cpu_flags": ("avx9000",)}
    for name in Requirements.__struct_fields__:
        other = msgspec.structs.replace(NEEDS, **{name: others.get(name, "other")})
        assert not decide(other, MACHINE, "cuda").accepted, name


def test_detecting_touches_cuda_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("asked CUDA"))
    assert host.detect("cpu", "").gpu_arch is None
