"""Which requests may start now, which wait, and which are refused.

- ``gate``: :class:`~baton_router.admission.gate.Admission`, the way in, and the limits of tenants.
- ``queue``: the fair queue and its metrics.
- ``estimates``: room for requests, and predictions for them.
"""
