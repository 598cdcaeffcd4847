"""Manifest and digests: what was written is compared with what is read back; arbitrary bytes and
mutated manifests with the errors that they may raise.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from crafted import copy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from m3compile.artifact import (
    MANIFEST,
    FileEntry,
    Manifest,
    check_files,
    list_files,
    read_json,
    read_manifest,
    write_manifest,
)
from m3compile.errors import (
    ArtifactDamagedError,
    ArtifactError,
)

reuse = settings(
    deadline=None,
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture
def manifest(golden_artifact: Path) -> Manifest:
    return read_manifest(golden_artifact)


def refusal(folder: Path, data: bytes) -> str:
    """What reading a manifest of these bytes says; it may say nothing but an ArtifactError."""
    (folder / MANIFEST).write_bytes(data)
    try:
        read_manifest(folder)
    except ArtifactError as error:
        message = str(error)
    else:
        return ""
    assert str(folder / MANIFEST) in message
    assert "\n" not in message
    return message


def test_a_manifest_comes_back_as_it_was_written(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest


def test_bytes_of_a_manifest(manifest: Manifest, tmp_path: Path) -> None:
    write_manifest(tmp_path, manifest)
    text = (tmp_path / MANIFEST).read_text()
    assert text.startswith('{\n "format_version": 1,\n "tower": {\n  "hidden_size": 160,')
    assert list(json.loads(text)) == list(Manifest.__struct_fields__)


@reuse
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(tmp_path: Path, data: bytes) -> None:
    assert refusal(tmp_path, data)


@reuse
@given(st.data())
def test_a_changed_byte_is_refused_or_harmless(
    golden_artifact: Path, tmp_path: Path, data: st.DataObject
) -> None:
    good = (golden_artifact / MANIFEST).read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    byte = data.draw(st.integers(0, 255))
    refusal(tmp_path, good[:at] + bytes([byte]) + good[at + 1 :])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)


def paths(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value inside."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    inner = [deeper for key, value in items for deeper in paths(value, (*path, key))]
    return [path, *inner] if path else inner


@reuse
@given(st.data())
def test_another_value_is_refused_or_possible(
    golden_artifact: Path, tmp_path: Path, data: st.DataObject
) -> None:
    document = json.loads((golden_artifact / MANIFEST).read_bytes())
    *way, key = data.draw(st.sampled_from(paths(document)))
    inner = document
    for step in way:
        inner = inner[step]
    inner[key] = data.draw(values)
    if not refusal(tmp_path, json.dumps(document).encode()):
        ladder = read_manifest(tmp_path).ladder
        assert all(low < high for low, high in zip((0, *ladder), ladder, strict=False))


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_every_field_is_needed_or_has_a_default(
    golden_artifact: Path, tmp_path: Path, field: str
) -> None:
    document = json.loads((golden_artifact / MANIFEST).read_bytes())
    del document[field]
    optional = field in ("times", "few_rows_tokens", "precision")
    assert bool(refusal(tmp_path, json.dumps(document).encode())) is not optional


# Files and digests.


def test_digests_are_sha256(golden_artifact: Path) -> None:
    for name, entry in list_files(golden_artifact).items():
        data = (golden_artifact / name).read_bytes()
        assert entry == FileEntry(size=len(data), sha256=hashlib.sha256(data).hexdigest())


def test_files_in_folders_are_listed_and_the_manifest_is_not(tmp_path: Path) -> None:
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/c").write_text("x")
    (tmp_path / MANIFEST).write_text("{}")
    (tmp_path / "a" / MANIFEST).write_text("{}")
    assert list(list_files(tmp_path)) == ["a/b/c", f"a/{MANIFEST}"]


def test_other_files_are_ignored(golden_artifact: Path, manifest: Manifest, tmp_path: Path) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    (folder / "notes.txt").write_text("mine")
    check_files(folder, manifest)


def test_sizes_are_compared_before_anything_is_read(
    golden_artifact: Path, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copy(golden_artifact, tmp_path / "a")
    os.truncate(folder / list(manifest.files)[-1], 10)
    monkeypatch.setattr("m3compile.artifact.files.file_digest", lambda path: pytest.fail(str(path)))
    with pytest.raises(ArtifactDamagedError, match="found 10 bytes"):
        check_files(folder, manifest)


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b"[" * 100_000])
def test_json_files_of_an_artifact(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.json").write_bytes(data)
    with pytest.raises(ArtifactDamagedError, match=r"x\.json: not valid JSON"):
        read_json(tmp_path / "x.json")
    with pytest.raises(ArtifactDamagedError, match="No such file"):
        read_json(tmp_path / "y.json")
