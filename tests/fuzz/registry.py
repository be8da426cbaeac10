"""Every target by its name. Importing this imports the whole project: do it under atheris' instrumentation."""

from __future__ import annotations

from tests.fuzz import agent_targets, codec_targets, record_targets, service_targets, store_targets
from tests.fuzz.target import Target

MODULES = (codec_targets, record_targets, agent_targets, service_targets, store_targets)
TARGETS: dict[str, Target] = {target.name: target for module in MODULES for target in module.TARGETS}
