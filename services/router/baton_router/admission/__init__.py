"""Who may start now, who waits, who is told to come back later."""

from baton_router.admission.gate import Admission, Limits, Ticket

__all__ = ["Admission", "Limits", "Ticket"]
