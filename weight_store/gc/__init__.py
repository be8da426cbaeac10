"""Garbage collection: raise the floor, wait out a minimum age by the store's clock, delete what is provably dead.

:mod:`~weight_store.gc.plan` decides, :mod:`~weight_store.gc.evidence` reads what it decides from,
:mod:`~weight_store.gc.collector` carries it out. The rules are in LAYOUT.md.
"""

from weight_store.gc.collector import Collector, Report
from weight_store.gc.floor import Wish

__all__ = ["Collector", "Report", "Wish"]
