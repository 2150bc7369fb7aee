"""Finding instances: beside those on the command line and those that register here, through Redis or Kubernetes.

A source tells the registry which addresses there are (``Registry.found``). What an instance is, it says itself: the
monitor asks, and refuses one that does not fit.
"""
