"""From the tower to an ONNX file: translations of ops, the export, and the files on disk.

Imports onnx and onnxscript; nothing outside `export-onnx` imports this package.
"""
