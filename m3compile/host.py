"""What this machine is, and whether an artifact can run on it.

`detect` is the one thin function that looks; `decide` is pure, so it is tested for machines that
nobody has at hand.
"""

from __future__ import annotations

import importlib.metadata
import platform
from pathlib import Path

import msgspec

from m3compile.artifact import Requirements
from m3compile.config.backends import BACKENDS

# Prefixes of /proc/cpuinfo flags that name instruction sets a compiler may use; the rest (virtual
# machine, power and security bits) come and go between equal processors.
_ISA_PREFIXES = (
    "3dnow", "adx", "aes", "amx", "asimd", "avx", "bf16", "bmi", "cldemote", "clflushopt", "clwb",
    "clzero", "f16c", "fma", "fsgsbase", "fxsr", "gfni", "i8mm", "lahf_lm", "lzcnt", "mmx",
    "movbe", "movdir", "pclmul", "popcnt", "prfchw", "rdpid", "rdrand", "rdseed", "serialize",
    "sha", "sse", "ssse", "sve", "vaes", "vpclmul", "wbnoinvd", "xsave", "abm",
)  # fmt: skip


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about a machine; fields as in `Requirements`.

    Attributes:
        attention_versions: implementation name to `package version`, for what is installed.
        gpu_names: for messages and provenance.
    """

    torch: str
    torch_full: str
    platform: str
    cpu_flags: tuple[str, ...]
    cpu_name: str
    cuda: str | None
    gpu_arch: str | None
    gpu_name: str | None
    attention_versions: dict[str, str]
    op_schema: str


class Decision(msgspec.Struct, frozen=True):
    """Accepted when `reasons` is empty; otherwise every reason why not."""

    reasons: tuple[str, ...]

    @property
    def accepted(self) -> bool:
        return not self.reasons


def detect(device: str, op_schema: str, device_index: int = 0) -> Host:
    """Look at this machine. Imports torch; touches CUDA only for `device` "cuda"."""
    import torch

    gpu_arch = gpu_name = None
    if device == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device_index)
        gpu_arch = f"sm_{major}{minor}"
        gpu_name = torch.cuda.get_device_name(device_index)
    flags, cpu_name = _cpu()
    return Host(
        torch=public_version(str(torch.__version__)),
        torch_full=str(torch.__version__),
        platform=f"{platform.system()}-{platform.machine()}".lower(),
        cpu_flags=flags,
        cpu_name=cpu_name,
        cuda=torch.version.cuda,
        gpu_arch=gpu_arch,
        gpu_name=gpu_name,
        attention_versions=attention_versions(str(torch.__version__)),
        op_schema=op_schema,
    )


def public_version(version: str) -> str:
    """A version without its local part: `2.13.0+cpu` and `2.13.0+cu130` are one source."""
    return version.split("+", 1)[0]


def attention_versions(torch_version: str) -> dict[str, str]:
    """`package version` of every implementation whose package is installed; imports none."""
    found: dict[str, str] = {}
    for facts in BACKENDS.values():
        if facts.parts:
            if all(part in found for part in facts.parts):
                found[facts.name] = " + ".join(found[part] for part in facts.parts)
        elif not facts.distributions:
            found[facts.name] = f"torch {public_version(torch_version)}"
        for name in facts.distributions:
            try:
                found[facts.name] = f"{name} {importlib.metadata.version(name)}"
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _cpu() -> tuple[tuple[str, ...], str]:
    flags: set[str] = set()
    name = platform.processor() or platform.machine()
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags.update(flag for flag in value.split() if flag.startswith(_ISA_PREFIXES))
        elif key.strip() == "model name":
            name = value.strip()
        elif not line.strip() and flags:
            break
    return tuple(sorted(flags)), name


def decide(required: Requirements, host: Host, device: str) -> Decision:
    """Whether a machine can run a program, and if not, every reason.

    Args:
        required: from the manifest.
        host: facts about the machine.
        device: the kind of device that was asked for.
    """
    reasons = []
    if device != required.device:
        reasons.append(f"built for device {required.device}, asked to run on {device}")
    for what, needed, found in (
        ("torch", required.torch, host.torch),
        ("platform", required.platform, host.platform),
        ("attention op schema", required.op_schema, host.op_schema),
    ):
        if needed != found:
            reasons.append(f"built for {what} {needed}, this machine has {found}")
    missing = sorted(set(required.cpu_flags) - set(host.cpu_flags))
    if missing:
        reasons.append(
            f"built with CPU instructions {' '.join(missing)}, this machine ({host.cpu_name}) "
            "lacks them"
        )
    if required.device == "cuda":
        if host.gpu_arch is None:
            reasons.append("built for CUDA, this machine has no usable CUDA device")
        elif host.gpu_arch != required.gpu_arch:
            reasons.append(
                f"built for GPU {required.gpu_arch}, this machine has {host.gpu_arch} "
                f"({host.gpu_name})"
            )
        if host.cuda != required.cuda:
            reasons.append(f"built for CUDA {required.cuda}, this torch has CUDA {host.cuda}")
    version = host.attention_versions.get(required.attention_backend)
    if version is None:
        reasons.append(
            f"built for attention {required.attention_backend} ({required.attention_version}), "
            "which is not installed here"
        )
    elif version != required.attention_version and not (
        _is_torch(version) and _is_torch(required.attention_version)
    ):
        reasons.append(
            f"built for attention {required.attention_backend} ({required.attention_version}), "
            f"this machine has {version}"
        )
    return Decision(tuple(reasons))


def _is_torch(version: str) -> bool:
    """Whether torch itself brings the backend; its version is compared once, as torch's."""
    return version.startswith("torch ")
