"""What can go wrong when deltas are measured.

::

    MeasureError    the data cannot be measured, or a codec did not reproduce it; the sentence says which and why
"""

from __future__ import annotations


class MeasureError(Exception):
    """Files that are missing, unreadable or do not belong together; or a round trip that was not exact."""

    code = "measure"
