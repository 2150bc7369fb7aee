"""Autoscaling: a controller that keeps the ratio of prefill to decode instances within targets of load and latency."""
