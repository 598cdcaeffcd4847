"""The artifact: a folder with a program, one copy of the weights and a manifest.

Layout of the folder:

    manifest.json              parsed strictly; says everything below
    encoder.pt2                AOTInductor package without weights (engine aoti)
    encoder.exported.pt2       exported program without weights (engine reduce-overhead), and
    compile_cache.zip          what torch.compile kept of compiling it
    weights.safetensors        every weight, by the program's own names
    verify.json                what the build's verification found
    preprocessor_config.json   the checkpoint's, where it has one

Every file but the manifest is listed there with its size and SHA-256. A folder MUST hold the
files that its manifest lists and MAY hold others, which are ignored.
"""

from m3compile.artifact.files import check_files, file_digest, list_files, read_json
from m3compile.artifact.manifest import (
    COMPILE_CACHE,
    EXPORTED,
    FEW_ROWS_PROGRAM,
    FORMAT_VERSION,
    MANIFEST,
    PREPROCESSOR,
    PROGRAM,
    VERIFY,
    WEIGHTS,
    FileEntry,
    Manifest,
    Provenance,
    Requirements,
    TensorSpec,
)
from m3compile.artifact.publish import check_target, publishing
from m3compile.artifact.reading import read_manifest, read_preprocess, write_manifest
from m3compile.artifact.seal import check_seal, program_inputs, program_outputs, seal

__all__ = [
    "COMPILE_CACHE",
    "EXPORTED",
    "FEW_ROWS_PROGRAM",
    "FORMAT_VERSION",
    "MANIFEST",
    "PREPROCESSOR",
    "PROGRAM",
    "VERIFY",
    "WEIGHTS",
    "FileEntry",
    "Manifest",
    "Provenance",
    "Requirements",
    "TensorSpec",
    "check_files",
    "check_seal",
    "check_target",
    "file_digest",
    "list_files",
    "program_inputs",
    "program_outputs",
    "publishing",
    "read_json",
    "read_manifest",
    "read_preprocess",
    "seal",
    "write_manifest",
]
