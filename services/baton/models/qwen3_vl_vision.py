"""The vision tower of Qwen3-VL and Qwen3.5: a transformer over 16 x 16 patches, each image by itself and all
its patches with each other; 2 x 2 neighbours of what comes out make one token of the language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from baton.layers.mlp import ACTIVATIONS
from baton.layers.norm import LayerNorm
from baton.layers.parameters import Parameters
from baton.layers.rope import apply_rope
from baton.models.config import ModelError

EPS = 1e-6
"""Epsilon of all layer norms."""


class Qwen3VLVisionTower:
    """Implements `decoder.VisionTower`. Ranks hold copies."""

    def __init__(self, hf: Any, parameters: Parameters, deep: Sequence[int] = ()) -> None:
        """`hf`: transformers' vision_config; `deep`: layers whose features are added behind the language
        model's first layers. Raises ModelError for what is not supported."""
        self._hidden, self._heads = hf.hidden_size, hf.num_heads
        self.patch, self._frames, self.merge = hf.patch_size, hf.temporal_patch_size, hf.spatial_merge_size
        if hf.hidden_act not in ACTIVATIONS:
            raise ModelError(
                f"hidden_act {hf.hidden_act!r} of vision_config is not supported; supported are "
                f"{', '.join(sorted(ACTIVATIONS))}"
            )
        if hf.in_channels != 3:
            raise ModelError(
                f"in_channels of vision_config must be 3 (red, green, blue), not {hf.in_channels}"
            )
        if self._hidden % (4 * self._heads):
            raise ModelError("hidden_size of vision_config must be a multiple of 4 times num_heads")
        self._theta = (hf.rope_parameters or {}).get("rope_theta", 10000.0)
        self.device, self.dtype = parameters.device, parameters.dtype
        shape = torch.Size((self._hidden, 3, self._frames, self.patch, self.patch))
        self._projection = parameters.empty(self._hidden, shape[1:].numel())
        parameters.add("patch_embed.proj.weight", self._projection, shape=shape, convert=_flat)
        self._projection_bias = parameters.tensor("patch_embed.proj.bias", self._hidden, fill="zeros")
        self._side = int(hf.num_position_embeddings**0.5)
        """The learned positions are a square of so many rows and columns."""
        self._positions = parameters.tensor("pos_embed.weight", hf.num_position_embeddings, self._hidden)
        self._blocks = [_Block(hf, parameters.under(f"blocks.{index}")) for index in range(hf.depth)]
        size = self._hidden * self.merge**2
        self._merger = _Merger(parameters.under("merger"), size, self._hidden, hf.out_hidden_size)
        self._deep = {
            layer: _Merger(parameters.under(f"deepstack_merger_list.{at}"), size, size, hf.out_hidden_size)
            for at, layer in enumerate(deep)
        }
        """By the tower's layer whose output it reads."""
        self.parts = 1 + len(self._deep)
        self.values = self.parts * hf.out_hidden_size

    @torch.inference_mode()
    def encode(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `VisionTower`. Heights and widths are multiples of merge * patch pixels."""
        counts = [image.shape[0] * image.shape[1] // self.patch**2 for image in images]
        grids = [(image.shape[0] // self.patch, image.shape[1] // self.patch) for image in images]
        patches = torch.cat([self._patches(image.to(self.device)) for image in images])
        coordinates = [self._coordinates(*grid) for grid in grids]
        hidden = F.linear(patches.to(self.dtype), self._projection, self._projection_bias)
        hidden = hidden + torch.cat([self._learned(*each) for each in zip(grids, coordinates, strict=True)])
        rotation = self._rotation(torch.cat(coordinates))
        features = []
        for index, block in enumerate(self._blocks):
            hidden = block(hidden, rotation, counts)
            if (merger := self._deep.get(index)) is not None:
                features.append(merger(hidden))
        rows = torch.stack((self._merger(hidden), *features))
        return list(torch.split(rows, [count // self.merge**2 for count in counts], 1))

    def _patches(self, image: torch.Tensor) -> torch.Tensor:
        """uint8 [height, width, 3] -> float32 [patches, 3 * frames * patch * patch], in the order of
        `_coordinates`: a still image is the same in all frames."""
        rows, columns = (size // self.patch // self.merge for size in image.shape[:2])
        values = (image.float() / 255 - 0.5) / 0.5
        values = values.view(rows, self.merge, self.patch, columns, self.merge, self.patch, 3)
        values = values.permute(0, 3, 1, 4, 6, 2, 5)  # [row, column, row in it, column in it, colour, y, x]
        values = values.unsqueeze(5).expand(*values.shape[:5], self._frames, *values.shape[5:])
        return values.reshape(rows * columns * self.merge**2, -1)

    def _coordinates(self, rows: int, columns: int) -> torch.Tensor:
        """Row and column of each patch, int64 [patches, 2]: those that make one token together."""
        coordinates = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        m = self.merge
        coordinates = coordinates.view(rows // m, m, columns // m, m, 2).transpose(1, 2)
        return coordinates.reshape(-1, 2).to(self.device)

    def _learned(self, grid: tuple[int, int], coordinates: torch.Tensor) -> torch.Tensor:
        """The learned positions, stretched to the image: between four of them linearly, [patches, hidden]."""
        last = torch.tensor(grid, device=self.device).sub_(1).clamp_(min=1)
        exact = coordinates.float() * (self._side - 1) / last
        low = exact.floor()
        share = (exact - low).unbind(1)
        low = low.long()
        high = (low + 1).clamp_(max=self._side - 1)
        total = torch.zeros(len(coordinates), self._hidden, device=self.device)
        for y, of_y in ((low[:, 0], 1 - share[0]), (high[:, 0], share[0])):
            for x, of_x in ((low[:, 1], 1 - share[1]), (high[:, 1], share[1])):
                total += self._positions[y * self._side + x].float() * (of_y * of_x)[:, None]
        return total.to(self.dtype)

    def _rotation(self, coordinates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For `apply_rope`, [patches, 1, dim] each, in float32: the first half of a head's pairs is turned by
        rows, the other by columns."""
        half = self._hidden // self._heads // 2
        exponents = torch.arange(0, half, 2, device=self.device, dtype=torch.float32) / half
        angles = (coordinates[:, :, None].float() * (1.0 / self._theta**exponents)).flatten(1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None]


class _Block:
    """x += attention(norm(x)); x += mlp(norm(x))"""

    def __init__(self, hf: Any, parameters: Parameters) -> None:
        hidden, inner = hf.hidden_size, hf.intermediate_size
        self._heads = hf.num_heads
        self._norm1 = LayerNorm(parameters, "norm1", hidden, EPS)
        self._norm2 = LayerNorm(parameters, "norm2", hidden, EPS)
        self._qkv = parameters.linear({"attn.qkv": 3 * hidden}, hidden, True, quantize=False)
        self._output = parameters.linear({"attn.proj": hidden}, hidden, True, quantize=False)
        self._up = parameters.linear({"mlp.linear_fc1": inner}, hidden, True, quantize=False)
        self._down = parameters.linear({"mlp.linear_fc2": hidden}, inner, True, quantize=False)
        self._activation = ACTIVATIONS[hf.hidden_act]

    def __call__(
        self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], counts: Sequence[int]
    ) -> torch.Tensor:
        """[patches, hidden] of all images, which have so many patches each."""
        qkv = self._qkv(self._norm1(x)).view(len(x), 3, self._heads, -1)
        if x.is_cuda:
            from baton.layers.kernels.vision_rope import rotate

            rotate(qkv, *rotation)
        else:
            qkv[:, :2] = apply_rope(qkv[:, :2].flatten(1, 2).float(), *rotation).view_as(qkv[:, :2])
        attended = [
            F.scaled_dot_product_attention(*each.permute(1, 2, 0, 3).unsqueeze(1))[0].transpose(0, 1)
            for each in torch.split(qkv, list(counts))
        ]
        x = self._output.add_to(x, torch.cat(attended).flatten(1))
        return self._down.add_to(x, self._activation(self._up(self._norm2(x))))


class _Merger:
    """Neighbouring patches -> a token of the language model."""

    def __init__(self, parameters: Parameters, size: int, normed: int, out: int) -> None:
        """`size`: values of the patches that make one token; `normed`: values that are normed together, those
        of one patch or of all."""
        self._size, self._normed = size, normed
        self._norm = LayerNorm(parameters, "norm", normed, EPS)
        self._first = parameters.linear({"linear_fc1": size}, size, True, quantize=False)
        self._second = parameters.linear({"linear_fc2": out}, size, True, quantize=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[patches, hidden] -> [tokens, out]"""
        normed = self._norm(x.view(-1, self._normed)).view(-1, self._size)
        return self._second(F.gelu(self._first(normed)))


def _flat(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1)
