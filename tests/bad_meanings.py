"""Bad artifacts whose digests fit: for another machine, or of parts that do not belong together.

Adds to `bad_folders.CASES`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bad_folders import (
    CASES,
    DAMAGED,
    INCOMPATIBLE,
    PROGRAM,
    WEIGHTS,
    case,
    field,
    machine,
    manifest,
)
from crafted import (
    change_package,
    change_weights,
    edited,
    redigest,
    reseal,
    rewrite,
)

# Another machine.
for key, value, *says in (
    ("torch", "2.12.1", "built for torch 2.12.1", "this machine has"),
    ("platform", "linux-riscv64", "built for platform linux-riscv64", "this machine has"),
    ("cpu_flags", ["avx", "avx9000"], "avx9000", "lacks"),
    ("attention_backend", "FLASH_ATTN_9", "FLASH_ATTN_9", "not installed"),
    ("op_schema", "old() -> ()", "old() -> ()", "varlen_attention"),
):
    machine(
        f"other {key}",
        field("requirements", key, value=value, sealed=True),
        INCOMPATIBLE,
        *says,
    )


def for_cuda(document: dict[str, Any]) -> None:
    document["requirements"].update(device="cuda", gpu_arch="sm_1", cuda="1.0")


machine(
    "for another GPU",
    manifest(for_cuda, sealed=True),
    INCOMPATIBLE,
    "CUDA",
    "this",
)


# Digests that fit, and another meaning.
def more_segments(document: dict[str, Any]) -> None:
    document["max_segments"] = 64
    document["inputs"][1]["shape"] = [64, 3]
    document["outputs"][1]["shape"] = [64]


def other_dtype(document: dict[str, Any]) -> None:
    document["dtype"] = "bfloat16"
    document["inputs"][0]["dtype"] = document["outputs"][0]["dtype"] = "bfloat16"


def drop_weight(document: dict[str, Any]) -> None:
    document["weights"] = [w for w in document["weights"] if w["name"] != "pre_norm.bias"]


def renamed(folder: Path) -> None:
    """Another program's weights, under a manifest and a seal that know them."""
    change_weights(folder, lambda t: t.update(pre_bias=t.pop("pre_norm.bias")))
    with edited(folder) as document:
        for spec in document["weights"]:
            if spec["name"] == "pre_norm.bias":
                spec["name"] = "pre_bias"
    reseal(folder)


def without_weight(folder: Path) -> None:
    change_weights(folder, lambda t: t.pop("pre_norm.bias"))
    with edited(folder) as document:
        drop_weight(document)


def only_seal(members: dict[str, bytes]) -> None:
    for name in list(members):
        if not name.endswith("m3compile.json"):
            del members[name]


def no_code(members: dict[str, bytes]) -> None:
    for name in members:
        if name.endswith(".so"):
            members[name] = b"\x7fELF garbage"


def cut_code(members: dict[str, bytes]) -> None:
    """To a size at which the dynamic linker dies of a bus error."""
    for name in members:
        if name.endswith(".so"):
            members[name] = members[name][:9000]


def guest(members: dict[str, bytes]) -> None:
    """A member that torch would unpack outside of its folder."""
    (code,) = (name for name in members if name.endswith(".so"))
    members[f"{code.rpartition('/')[0]}/../../../../../../guest"] = b"x"


def no_seal(members: dict[str, bytes]) -> None:
    for name in list(members):
        if name.endswith("m3compile.json"):
            del members[name]


def garbage_seal(members: dict[str, bytes]) -> None:
    for name in members:
        if name.endswith("m3compile.json"):
            members[name] = b"{"


def two_seals(members: dict[str, bytes]) -> None:
    members["other/extra/m3compile.json"] = b"{}"


def other_zip(members: dict[str, bytes]) -> None:
    members.clear()
    members["a/b.txt"] = b"hello"


case("more segments", manifest(more_segments), DAMAGED, PROGRAM, "max_segments 32", "found 64")
case("dtype of another", manifest(other_dtype), DAMAGED, PROGRAM, "dtype 'float32'", "'bfloat16'")
for key, value, found in (
    ("hidden_size", 320, "160"),
    ("layer_norm_eps", 1e-6, "1e-05"),
    ("rope_theta", 1e6, "10000.0"),
    ("vision_segment_max_frames", 8, "4"),
    ("num_hidden_layers", 4, "3"),
):
    case(
        f"other {key}",
        field("tower", key, value=value),
        DAMAGED,
        PROGRAM,
        f"tower.{key} {found}, found {value}",
    )


def second_program(folder: Path) -> None:
    """The program for every size in the place of the one for few rows."""
    shutil.copy(folder / PROGRAM, folder / "few_rows.pt2")
    with edited(folder) as document:
        document["few_rows_tokens"] = 16
        document["files"]["few_rows.pt2"] = document["files"][PROGRAM]
    reseal(folder)
    (folder / "few_rows.pt2").write_bytes((folder / PROGRAM).read_bytes())
    redigest(folder)


case("the wrong program", second_program, DAMAGED, "few_rows.pt2", "file 'encoder.pt2'")
case("a few rows", field("few_rows_tokens", value=16), DAMAGED, "does not list few_rows.pt2")
case("too few rows", field("few_rows_tokens", value=-1), DAMAGED, "few_rows")
case(
    "flags left out",
    field("requirements", "cpu_flags", value=[]),
    DAMAGED,
    PROGRAM,
    "requirements.cpu_flags",
)
case(
    "weight shape in the manifest",
    field("weights", 1, "shape", value=[321]),
    DAMAGED,
    PROGRAM,
    "tensor layers.0.fc1.bias: float32 [320], found float32 [321]",
)
case(
    "a weight in neither",
    without_weight,
    DAMAGED,
    PROGRAM,
    "tensor pre_norm.bias: float32 [160], found no such tensor",
)
case("another program", renamed, DAMAGED, PROGRAM, "pre_norm.bias", "pre_bias")
CASES["another program"] = CASES["another program"]._replace(inspect=False)

case("program garbage", lambda f: rewrite(f, PROGRAM, b"x" * 5000), DAMAGED, PROGRAM, "package")
case("program empty", lambda f: rewrite(f, PROGRAM, b""), DAMAGED, PROGRAM, "package")
case("program another zip", lambda f: change_package(f, other_zip), DAMAGED, PROGRAM, "0 seals")
case("no seal", lambda f: change_package(f, no_seal), DAMAGED, PROGRAM, "0 seals")
case("two seals", lambda f: change_package(f, two_seals), DAMAGED, PROGRAM, "2 seals")
case("seal garbage", lambda f: change_package(f, garbage_seal), DAMAGED, PROGRAM, "seal")
case("only a seal", lambda f: change_package(f, only_seal), DAMAGED, PROGRAM, "no such member")
case("code cut", lambda f: change_package(f, cut_code), DAMAGED, ".so", "found SHA-256", "expected")
case("a guest", lambda f: change_package(f, guest), DAMAGED, "../../guest", "expected no such")
for name, change in (("sealed without code", only_seal), ("sealed with garbage", no_code)):
    machine(
        name,
        lambda f, c=change: (change_package(f, c), reseal(f)),
        DAMAGED,
        PROGRAM,
        "cannot be opened",
    )


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    return lambda folder: change_weights(folder, change)


def set_bias(make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return weights(lambda t: t.update({"pre_norm.bias": make(t["pre_norm.bias"])}))


def bytes_of_weights(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: rewrite(folder, WEIGHTS, change((folder / WEIGHTS).read_bytes()))


NAMED = (WEIGHTS, "tensor pre_norm.bias")
for name, make, *says in (
    ("missing", weights(lambda t: t.pop("pre_norm.bias")), "found no such tensor, expected float"),
    ("longer", set_bias(lambda b: torch.zeros(161)), "found float32 [161], expected float32 [160]"),
    ("of two dims", set_bias(lambda b: b[None].clone()), "found float32 [1, 160]", "[160]"),
    ("of another dtype", set_bias(lambda b: b.bfloat16()), "found bfloat16 [160]", "float32 [160]"),
    ("of ints", set_bias(lambda b: b.long()), "I64 [160]", "float32 [160]"),
    ("empty", set_bias(lambda b: b[:0].clone()), "found float32 [0]", "float32 [160]"),
):  # fmt: skip
    machine(f"weight {name}", make, DAMAGED, *NAMED, *says)
machine(
    "one weight too many",
    weights(lambda t: t.update(stray=torch.zeros(1))),
    DAMAGED,
    WEIGHTS,
    "tensor stray: found float32 [1], expected no such tensor",
)
machine("weights garbage", bytes_of_weights(lambda b: b"\xff" * 5000), DAMAGED, WEIGHTS)
machine("weights emptied", bytes_of_weights(lambda b: b""), DAMAGED, WEIGHTS)
machine("weights cut", bytes_of_weights(lambda b: b[:-4]), DAMAGED, WEIGHTS)
machine("weights stretched", bytes_of_weights(lambda b: b + bytes(4)), DAMAGED, WEIGHTS)
machine("no header", bytes_of_weights(lambda b: b"\2" + bytes(7) + b"{}"), DAMAGED, WEIGHTS)
