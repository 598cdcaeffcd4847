"""One bad artifact per way to be bad: how it is made, and what the loader must say.

`CASES` by name: `make` spoils a good copy in place, `error` is the class of the refusal, `says`
are parts of its message: the file, what was found and what was expected. `inspect` refuses it
too, except where only another machine, or the weights against the manifest, are at fault.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from crafted import edited, reseal

MANIFEST, PROGRAM, WEIGHTS = "manifest.json", "encoder.pt2", "weights.safetensors"
VERIFY = "verify.json"
DAMAGED, INCOMPATIBLE = "ArtifactDamagedError", "ArtifactIncompatibleError"
NOT_FOUND = "ArtifactNotFoundError"


class Case(NamedTuple):
    make: Callable[[Path], object]
    error: str
    says: tuple[str, ...]
    inspect: bool = True


CASES: dict[str, Case] = {}


def case(name: str, make: Callable[[Path], object], error: str, *says: str) -> None:
    assert name not in CASES
    CASES[name] = Case(make, error, says)


def machine(name: str, make: Callable[[Path], object], error: str, *says: str) -> None:
    case(name, make, error, *says)
    CASES[name] = CASES[name]._replace(inspect=False)


def field(*path: Any, value: Any, sealed: bool = False) -> Callable[[Path], None]:
    """Set one field of the manifest, and of the seal as well if `sealed`."""

    def make(folder: Path) -> None:
        with edited(folder) as manifest:
            inner = manifest
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
        if sealed:
            reseal(folder)

    return make


def text(content: str | bytes) -> Callable[[Path], None]:
    """Replace the manifest."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / MANIFEST).write_bytes(data) and None


def manifest(change: Callable[[dict[str, Any]], object], **options: bool) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        with edited(folder) as document:
            change(document)
        if options.get("sealed"):
            reseal(folder)

    return make


def replaced_manifest(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / MANIFEST).unlink()
        make(folder / MANIFEST)

    return change


def huge(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(17 * 1024 * 1024)


# The folder and the manifest's bytes.
case("no folder", shutil.rmtree, NOT_FOUND, "no such artifact folder")
case("no manifest", lambda f: (f / MANIFEST).unlink(), NOT_FOUND, "it has no manifest.json")
case("empty manifest", text(""), DAMAGED, MANIFEST, "not valid JSON")
case(
    "truncated manifest",
    lambda f: os.truncate(f / MANIFEST, 1000),
    DAMAGED,
    MANIFEST,
    "not valid JSON",
)
case("no JSON", text("hello"), DAMAGED, MANIFEST, "not valid JSON")
case("not UTF-8", text(b'{"format_version": "\xff"}'), DAMAGED, MANIFEST)
case("a list", text("[1]"), DAMAGED, "holds a list", "expected an object")
case("NaN", text('{"format_version": NaN}'), DAMAGED, MANIFEST, "not valid JSON")
case("infinite", text('{"format_version": 1e999}'), DAMAGED, MANIFEST)
case("deep", text('{"a":' + "[" * 200_000), DAMAGED, MANIFEST, "not valid JSON")
case("deep and complete", text("[" * 20_000 + "]" * 20_000), DAMAGED, MANIFEST)
case("many digits", text('{"format_version": ' + "9" * 20_000 + "}"), DAMAGED, MANIFEST)
case("manifest of 17 MB", replaced_manifest(huge), DAMAGED, "17825792 bytes", "16777216")
case("manifest a folder", replaced_manifest(Path.mkdir), DAMAGED, "not a regular file")
case("manifest a pipe", replaced_manifest(os.mkfifo), DAMAGED, "not a regular file")
case(
    "manifest a dead link",
    replaced_manifest(lambda path: path.symlink_to("nowhere")),
    DAMAGED,
    "not a regular file",
)

# Its fields.
case("no version", manifest(lambda m: m.pop("format_version")), DAMAGED, "format_version is None")
case("version a word", field("format_version", value="1"), DAMAGED, "format_version is '1'")
case("version true", field("format_version", value=True), DAMAGED, "format_version is True")
case("next version", field("format_version", value=2), INCOMPATIBLE, "version 2", "reads 1")
case("unknown field", field("extra", value=1), DAMAGED, MANIFEST, "`extra`")
case("unknown inner field", field("tower", "extra", value=1), DAMAGED, "`extra`", "$.tower")
case("missing field", manifest(lambda m: m.pop("ladder")), DAMAGED, "`ladder`")
case("missing inner", manifest(lambda m: m["requirements"].pop("torch")), DAMAGED, "`torch`")
case("ladder a word", field("ladder", value="64"), DAMAGED, "$.ladder", "`str`")
case("ladder of words", field("ladder", value=["64"]), DAMAGED, "$.ladder", "`str`")
case("a null", field("tower", value=None), DAMAGED, "$.tower", "`null`")
case("ladder empty", field("ladder", value=[]), DAMAGED, "ladder is []", "16384")
case("ladder falls", field("ladder", value=[64, 16]), DAMAGED, "[64, 16]", "increasing")
case("ladder stays", field("ladder", value=[64, 64]), DAMAGED, "[64, 64]", "increasing")
case("ladder of zero", field("ladder", value=[0, 64]), DAMAGED, "[0, 64]", "from 1")
case("ladder too high", field("ladder", value=[64, 16385]), DAMAGED, "16385", "16384")
case("no segments", field("max_segments", value=0), DAMAGED, "max_segments is 0")
case("many segments", field("max_segments", value=2**31), DAMAGED, "2147483648", "4096")
case("unknown device", field("requirements", "device", value="tpu"), DAMAGED, "tpu", "cpu or cuda")
case("unknown dtype", field("dtype", value="float16"), DAMAGED, "float16", "bfloat16")
case("odd heads", field("tower", "num_attention_heads", value=3), DAMAGED, "$.tower", "allowed")
case("no layers", field("tower", "num_hidden_layers", value=0), DAMAGED, "num_hidden_layers is 0")
case("unknown capture", field("build", "capture", value="often"), DAMAGED, "capture is 'often'")
case("other engine", field("build", "engine", value="reduce-overhead"), DAMAGED, "does not list")
case("unknown engine", field("build", "engine", value="onnx"), DAMAGED, "engine is 'onnx'", "aoti")
case(
    "times of nothing",
    field("times", value={"budgets": [], "linear_ms": [], "full_ms": [], "exact_ms": []}),
    DAMAGED,
    "$.times",
)
case(
    "input too wide",
    field("inputs", 0, "shape", value=["num_patches", 1175]),
    DAMAGED,
    "pixel_values float32 ['num_patches', 1175]",
    "1176",
)
case("input int64", field("inputs", 1, "dtype", value="int64"), DAMAGED, "segments int64", "int32")
case("no output", field("outputs", value=[]), DAMAGED, "outputs", "is_nonfinite")
case("output narrow", field("outputs", 0, "shape", 1, value=95), DAMAGED, "95]", "96]")
case("weight of words", field("weights", 0, "shape", value=["x"]), DAMAGED, "inverse_frequency")
case("weight negative", field("weights", 0, "shape", value=[-1]), DAMAGED, "[-1]", "positive")
case(
    "weight twice",
    manifest(lambda m: m["weights"].append(m["weights"][0])),
    DAMAGED,
    "inverse_frequency twice",
)
for bad in ("../x", "/etc/passwd", "a/../../x", "a\\b", "", ".", "a\nb", MANIFEST, "./x", "a//b"):
    case(
        f"file named {bad!r}",
        field("files", bad, value={"size": 1, "sha256": ""}),
        DAMAGED,
        MANIFEST,
        "inside the artifact",
    )
for needed in (PROGRAM, WEIGHTS):
    case(
        f"{needed} not listed",
        manifest(lambda m, name=needed: m["files"].pop(name)),
        DAMAGED,
        f"does not list {needed}",
    )
case("size a word", field("files", PROGRAM, "size", value="1"), DAMAGED, "`str`")


# The other files' bytes.
def flip(folder: Path, name: str) -> None:
    with open(folder / name, "r+b") as file:
        file.seek(os.path.getsize(folder / name) // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def to_folder(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()


def to_pipe(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)


def longer(folder: Path, name: str) -> None:
    with open(folder / name, "ab") as file:
        file.write(b"\0")


for name in (PROGRAM, WEIGHTS, VERIFY):
    for how, damage, *says in (
        ("missing", lambda f, n: (f / n).unlink(), "missing", "expected", "bytes"),
        ("truncated", lambda f, n: os.truncate(f / n, 1000), "found 1000 bytes", "expected"),
        ("empty", lambda f, n: os.truncate(f / n, 0), "found 0 bytes", "expected"),
        ("longer", longer, "bytes, expected"),
        ("flipped", flip, "found SHA-256", "expected"),
        ("a folder", to_folder, "no regular file"),
        ("a pipe", to_pipe, "no regular file"),
    ):
        case(f"{name} {how}", lambda f, d=damage, n=name: d(f, n), DAMAGED, name, *says)
