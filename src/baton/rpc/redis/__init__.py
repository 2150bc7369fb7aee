"""Redis as services use it: its client, and registrations there that are signed."""
