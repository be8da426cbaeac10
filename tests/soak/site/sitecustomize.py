"""Read by every Python of a soak that goes without a mechanism, before anything else: see ``tests/soak/without.py``."""

import os
import traceback

if name := os.environ.get("WEIGHTCAST_SOAK_WITHOUT"):
    try:
        from tests.soak.without import switch_off

        switch_off(name)
    except BaseException:  # Python itself would go on as if nothing were off
        traceback.print_exc()
        os._exit(99)
