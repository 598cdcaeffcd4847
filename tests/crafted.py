"""Artifacts that are damaged on purpose, from copies of a good one."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SEAL = "extra/m3compile.json"
# What the seal inside the program repeats of the manifest.
SEALED = (
    "tower",
    "dtype",
    "max_segments",
    "inputs",
    "outputs",
    "weights",
    "requirements",
    "few_rows_tokens",
)


def copy(artifact: Path, folder: Path) -> Path:
    shutil.copytree(artifact, folder)
    return folder


@contextmanager
def edited(folder: Path) -> Iterator[dict[str, Any]]:
    """The manifest as a dict to change; digests stay as they are."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    yield document
    path.write_text(json.dumps(document))


def redigest(folder: Path) -> None:
    """Make the manifest's sizes and digests those of the files."""
    with edited(folder) as manifest:
        for name in manifest["files"]:
            data = (folder / name).read_bytes()
            manifest["files"][name] = {
                "size": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }


def rewrite(folder: Path, name: str, data: bytes) -> None:
    """Give a file other content, and the manifest its digest."""
    (folder / name).write_bytes(data)
    redigest(folder)


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of weights.safetensors, with a matching digest."""
    path = folder / "weights.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    redigest(folder)


def change_package(folder: Path, change: Callable[[dict[str, bytes]], object]) -> None:
    """Change the members of encoder.pt2, with a matching digest."""
    path = folder / "encoder.pt2"
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    redigest(folder)


def reseal(folder: Path) -> None:
    """Make the seal say what the manifest and the package say."""
    manifest = json.loads((folder / "manifest.json").read_text())

    def change(members: dict[str, bytes]) -> None:
        (seal,) = (name for name in members if name.endswith(SEAL))
        digests = {
            name: hashlib.sha256(data).hexdigest() for name, data in members.items() if name != seal
        }
        text = {name: manifest[name] for name in SEALED} | {
            "file": "encoder.pt2",
            "members": digests,
        }
        members[seal] = json.dumps(text).encode()

    change_package(folder, change)
