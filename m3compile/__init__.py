"""m3compile."""
