"""The encoder on Ray: Serve and Data."""
