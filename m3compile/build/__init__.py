"""From a tower to a compiled package: export, then AOTInductor."""
