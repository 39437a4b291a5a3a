"""Augmentation on the device, a whole batch at a time: chance comes from a generator there, and nothing waits for the host.

Images are (N, C, H, W), uint8 or float, and come back in the same type. Shifting before normalising makes the border black, as
is usual, and moves a quarter of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import log

import torch
import torch.nn.functional as F
from torch import Generator, Tensor


@lru_cache(maxsize=64)
def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """(C, 1, 1); kept, since making it on a GPU waits for a copy."""
    return torch.tensor(values, dtype=torch.float32, device=device)[
        :, None, None
    ]


def normalise(
    x: Tensor,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """(x/255 − mean)/std per channel, of uint8 pixels."""
    if x.dtype != torch.uint8:
        raise TypeError(
            f"normalise takes pixels as uint8, not {x.dtype}: normalise once, and only what is raw"
        )
    if not len(mean) == len(std) == x.shape[1]:
        raise ValueError(
            f"{x.shape[1]} channels need as many means and deviations, not {len(mean)} and {len(std)}"
        )
    scale = _per_channel(tuple(1 / (255 * s) for s in std), x.device)
    shift = _per_channel(
        tuple(-m / s for m, s in zip(mean, std, strict=True)), x.device
    )
    return (x * scale).add_(shift).to(dtype)


def _uniform(count: int, generator: Generator, like: Tensor) -> Tensor:
    return torch.rand(
        count, generator=generator, device=like.device, dtype=torch.float32
    )


def _mirrored(length: int, pad: int, like: Tensor) -> Tensor:
    """Where the rows, or columns, of the padded image come from: 2 1 | 0 1 2 3 | 2 1."""
    place = torch.arange(-pad, length + pad, device=like.device).abs()
    return (length - 1) - ((length - 1) - place).abs()


def crop(
    x: Tensor, pad: int, generator: Generator, reflect: bool = False
) -> Tensor:
    """Every image shifted by up to `pad` pixels along both axes; what comes in from outside is zero, or mirrored."""
    count, _, height, width = x.shape
    if pad < 0 or (reflect and pad >= min(height, width)):
        raise ValueError(
            f"a shift by up to {pad} pixels does not fit images of {height} × {width}"
        )
    if reflect:  # by hand, as torch does not mirror bytes
        padded = x.index_select(2, _mirrored(height, pad, x)).index_select(
            3, _mirrored(width, pad, x)
        )
    else:
        padded = F.pad(x, [pad] * 4)
    windows = padded.unfold(2, height, 1).unfold(
        3, width, 1
    )  # (N, C, 2 pad + 1, 2 pad + 1, H, W), a view
    down, across = torch.randint(
        2 * pad + 1, (2, count), generator=generator, device=x.device
    )
    return windows[torch.arange(count, device=x.device), :, down, across]


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Every image mirrored or not, left to right, with equal chances."""
    mirrored = _uniform(len(x), generator, x) < 0.5
    return torch.where(mirrored[:, None, None, None], x.flip(-1), x)


def resized_crop(
    x: Tensor,
    size: int,
    generator: Generator,
    scale: tuple[float, float] = (0.35, 1),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Tensor:
    """Of every image a window of a random share of its area and a random shape, as `size` × `size` pixels (bilinear).

    A window that would be wider or higher than the image is cut to it. Pixels are interpolated and not averaged: where `size`
    is far below the image's, shrink the images first.
    """
    count, channels, height, width = x.shape
    area = (
        height
        * width
        * (scale[0] + (scale[1] - scale[0]) * _uniform(count, generator, x))
    )
    shape = (
        log(ratio[0])
        + (log(ratio[1]) - log(ratio[0])) * _uniform(count, generator, x)
    ).exp()
    wide = ((area * shape).sqrt() / width).clamp(
        max=1
    )  # as shares of the image
    high = ((area / shape).sqrt() / height).clamp(max=1)
    theta = torch.zeros(count, 2, 3, device=x.device, dtype=torch.float32)
    theta[:, 0, 0], theta[:, 1, 1] = wide, high
    theta[:, 0, 2] = (1 - wide) * (
        2 * _uniform(count, generator, x) - 1
    )  # the centre, from −1 to 1 across the image
    theta[:, 1, 2] = (1 - high) * (2 * _uniform(count, generator, x) - 1)
    pixels = x if x.is_floating_point() else x.float()
    grid = F.affine_grid(
        theta, [count, channels, size, size], align_corners=False
    ).to(pixels.dtype)
    out = F.grid_sample(
        pixels,
        grid,
        mode="bilinear",
        padding_mode="border",
        align_corners=False,
    )
    return (
        out
        if x.is_floating_point()
        else out.round_().clamp_(0, 255).to(x.dtype)
    )


@dataclass(frozen=True)
class Augment:
    """What a task does to its training images; nothing by default."""

    crop: int = 0  # pixels
    flip: bool = False
    resized: bool = False

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ValueError(
                f"crop is a number of pixels, at least 0, not {self.crop}"
            )

    def __call__(self, x: Tensor, generator: Generator) -> Tensor:
        """One batch; the generator is on its device."""
        if self.resized:
            x = resized_crop(x, x.shape[-1], generator)
        if self.crop:
            x = crop(x, self.crop, generator)
        return flip(x, generator) if self.flip else x
