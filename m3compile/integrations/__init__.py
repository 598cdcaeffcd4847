"""Adapters for servers that run the encoder inside themselves; none is imported unless used."""
