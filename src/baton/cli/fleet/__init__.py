"""The controller of the ratio on the command line: ``baton autoscale``, and ``baton up --autoscale``."""
