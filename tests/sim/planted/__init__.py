"""Bugs that can be planted into the real core, one at a time, to show that the simulator finds them."""

from __future__ import annotations

import planted.core_bugs
import planted.disk_bugs
import planted.draft_bugs
import planted.gateway_bugs
import planted.host_tier_bugs
import planted.image_bugs
import planted.role_bugs
import planted.source_bugs
import planted.state_bugs
from planted.planting import BUGS, planted

__all__ = ["BUGS", "planted"]
