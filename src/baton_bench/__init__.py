"""Benchmarks and planning, above all other packages: what ``baton bench``, ``profile``, ``plan`` and ``tune`` run.

:mod:`~baton_bench.report` has the record, the report and the tables that all share, :mod:`~baton_bench.agents` the
processes that drivers control, :mod:`~baton_bench.traces` the workloads, :mod:`~baton_bench.simulator` deployments on
virtual time.
"""
