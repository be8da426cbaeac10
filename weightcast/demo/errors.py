"""What can go wrong in the demo.

::

    DemoError    the demonstration did not hold; the sentence says what was found
"""

from __future__ import annotations


class DemoError(Exception):
    """The run did not show what it promises, or one of its processes ended early."""

    code = "demo"
