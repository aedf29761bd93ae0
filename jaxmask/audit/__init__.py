"""Checks on anyone's rollouts, and what truncation did to them: `jaxmask audit FILE`.

On the host, with NumPy alone, block by block: a file of JSON lines may be larger than the memory.
"""

from jaxmask.audit.auditing import Audit, audit, audit_rollout
from jaxmask.audit.files import FORMS, UnreadableError
from jaxmask.audit.finding import Finding, Place, Severity
from jaxmask.audit.statistics import Statistics

__all__ = ["FORMS", "Audit", "Finding", "Place", "Severity", "Statistics", "UnreadableError", "audit", "audit_rollout"]
