"""The seal in a compiled package: checked against manifests that differ from it in one field, and
against packages whose members, or bytes, differ from those that were sealed.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3compile.artifact import (
    PROGRAM,
    Manifest,
    check_seal,
    program_inputs,
    program_outputs,
    read_manifest,
    seal,
)
from m3compile.config import TINY
from m3compile.errors import ArtifactDamagedError

reuse = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def manifest(golden_artifact: Path) -> Manifest:
    return read_manifest(golden_artifact)


@pytest.fixture
def package(tmp_path: Path, manifest: Manifest) -> Path:
    path = tmp_path / PROGRAM
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("root/code.so", b"code")
        archive.writestr("root/version", b"1")
    seal(path, manifest)
    return path


def test_a_seal_fits_its_manifest(package: Path, manifest: Manifest) -> None:
    check_seal(package, manifest)


def test_what_changes_after_the_build_is_not_sealed(package: Path, manifest: Manifest) -> None:
    changed = msgspec.structs.replace(manifest, files={}, ladder=(8,), bounds=manifest.bounds)
    check_seal(package, changed)


def test_a_seal_holds_every_requirement(package: Path, manifest: Manifest) -> None:
    for name in manifest.requirements.__struct_fields__:
        needs = msgspec.structs.replace(manifest.requirements, **{name: "other"})
        with pytest.raises(ArtifactDamagedError, match=rf"requirements\.{name} .*'other'"):
            check_seal(package, msgspec.structs.replace(manifest, requirements=needs))


def test_a_seal_holds_every_size_of_the_tower(package: Path, manifest: Manifest) -> None:
    others = {"hidden_size": 320, "num_attention_heads": 4, "layer_norm_eps": 1e-6}
    for name in TINY.__struct_fields__:
        # Of a size that has one possible value there is no other.
        if name == "spatial_merge_size":
            continue
        other = others.get(name, 5)
        tower = msgspec.structs.replace(manifest.tower, **{name: other})
        with pytest.raises(ArtifactDamagedError, match=rf"tower\.{name} "):
            check_seal(package, msgspec.structs.replace(manifest, tower=tower))


def test_a_member_that_comes_twice(package: Path, manifest: Manifest) -> None:
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(package, "a") as archive:
        archive.writestr("root/code.so", b"code")
    with pytest.raises(ArtifactDamagedError, match=r"member 'root/code\.so'"):
        check_seal(package, manifest)


@pytest.mark.parametrize("change", [b"codf", None])
def test_a_member_that_changed(package: Path, manifest: Manifest, change: bytes | None) -> None:
    with zipfile.ZipFile(package) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["root/code.so"] = change or b""
    if change is None:
        del members["root/code.so"]
    with zipfile.ZipFile(package, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    with pytest.raises(
        ArtifactDamagedError, match=r"member 'root/code\.so': found .* expected SHA"
    ):
        check_seal(package, manifest)


@reuse
@given(st.data())
def test_a_changed_byte_of_a_package_never_passes_for_another(
    package: Path, manifest: Manifest, data: st.DataObject
) -> None:
    good = package.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255))
    changed = package.with_name("changed") / PROGRAM
    changed.parent.mkdir(exist_ok=True)
    changed.write_bytes(good[:at] + bytes([byte]) + good[at + 1 :])
    try:
        check_seal(changed, manifest)
    except ArtifactDamagedError:
        return
    with zipfile.ZipFile(changed) as archive:
        assert archive.read("root/code.so") == b"code"


def test_inputs_and_outputs_are_those_of_the_contract() -> None:
    inputs = program_inputs(TINY, "bfloat16", 7)
    assert [(spec.name, spec.dtype, spec.shape) for spec in inputs] == [
        ("pixel_values", "bfloat16", ("num_patches", 1176)),
        ("segments", "int32", (7, 3)),
    ]
    outputs = program_outputs(TINY, "bfloat16", 7)
    assert [(spec.name, spec.dtype, spec.shape) for spec in outputs] == [
        ("embeddings", "bfloat16", ("num_patches/4", 96)),
        ("is_nonfinite", "bool", (7,)),
    ]
