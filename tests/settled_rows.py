"""`DeviceSlots.settle` as it is meant, on any device: what its kernel is compared with."""

from __future__ import annotations

import torch

from baton.engine.device_slots import DeviceSlots


def settle(
    slots: DeviceSlots,
    ids: torch.Tensor,
    positions: torch.Tensor,
    lengths: torch.Tensor,
    token_slots: torch.Tensor,
    row_slots: torch.Tensor,
    drafts: torch.Tensor,
) -> None:
    follows = positions < 0
    right = torch.where(follows, slots.right.index_select(0, token_slots), 0)
    at = (right - 2 - ids).clamp_(0, len(drafts) - 1)
    ids.copy_(torch.where(ids < -1, drafts.index_select(0, at), ids))
    ids.copy_(slots.tokens(ids, token_slots))
    positions.copy_(torch.where(follows, right - 1 - positions, positions))
    longer = slots.right.index_select(0, row_slots) - lengths
    lengths.copy_(torch.where(lengths < 0, longer, lengths))
    slots.unsettle(row_slots.long())
