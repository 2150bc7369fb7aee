"""The disk tier: blocks in append-only segment files, of which a killed process loses nothing that was synced."""
