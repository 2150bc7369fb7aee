"""The command line ``baton``; ``baton.cli.main`` is its entry point."""
