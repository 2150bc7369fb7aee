"""Which requests may start now, which wait, and which are refused."""
