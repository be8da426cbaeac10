"""Tries out a store and says what is safe on it; never trusts a vendor's word, nor one request at a time.

:mod:`~weight_store.doctor.observing` and :mod:`~weight_store.doctor.s3_observing` do things to a store,
:mod:`~weight_store.doctor.diagnosis` says what they mean.
"""

from weight_store.doctor.diagnosis import Check, Conditional, Diagnosis, Observations, classify, diagnose
from weight_store.doctor.examining import Examination, require_conditional_writes

__all__ = [
    "Check",
    "Conditional",
    "Diagnosis",
    "Examination",
    "Observations",
    "classify",
    "diagnose",
    "require_conditional_writes",
]
