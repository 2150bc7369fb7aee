"""The console and ``/debug``: decisions and their reasons, rates, and the prefix index."""
