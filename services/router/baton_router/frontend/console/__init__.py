"""What there is to see: the console, and ``/debug``."""
