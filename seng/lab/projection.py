"""How long a step would take on N GPUs: the formulae of `seng scale`.

Of one GPU's step, measured or given: C (SGD's), S (what SENG's adds between refreshes) and R (a refresh), in seconds. Of the
network: layers of n_l numbers, n = Σ n_l, so that a gradient is g = b·n bytes. Of the link: latency α, bandwidth β. On N GPUs

    all-reduce of x bytes          ρ(x) = 2(N−1)/N · x/β + 2(N−1)·α        ring
                                   ρ(x) = 2(N−1)/N · x/β + 2⌈log₂N⌉·α      tree (two binary trees at once, as NCCL's)
    all-to-all of x bytes per GPU  τ(x) = (N−1)/N · x/β + (N−1)·α
    beside the backward            ε(x) = ρ(x) − min(overlap·ρ(x), ⅔C): a share of it is hidden, no more than the backward lasts

and a step takes

    SGD      C + ε(g)
    shared   C + S + ε(g) + (R + ρ(b_Q·Σ min(k, n_l)·n_l) + τ(b·ϱ·Σ min(q, n_l)) + τ(b·ϱ·Σ min(k, n_l))) / T
                                                          per refresh: a basis of k·n numbers is all-reduced; before, each GPU's
                                                          sketches, q·ϱ numbers a layer, go to the layer's owner, and k·ϱ return
    block    C + S + ε(g) + ρ(g) + R/T                    one more gradient, when the first one is there
    lagged   C + S + ε(2g) + R/T                          one more gradient, in the same message

Efficiency is the step's time on the base number of GPUs over that on N, each GPU having the same batch; the paper's base is 4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

BACKWARD = 2 / 3  # of C


@dataclass(frozen=True)
class Compute:
    """Seconds of one GPU, and where they are from."""

    step: float  # C
    solve: float = 0.0  # S
    refresh: float = 0.0  # R
    source: str = "as given"


@dataclass(frozen=True)
class Link:
    """Between any two GPUs."""

    latency_us: float = 10.0
    """α, in microseconds."""
    bandwidth_gbs: float = 25.0
    """β, in 10⁹ bytes per second and GPU."""
    reduction: Literal["ring", "tree"] = "ring"
    """The algorithm of an all-reduce."""

    def __post_init__(self) -> None:
        if not 0 <= self.latency_us < math.inf:
            raise ValueError(
                f"--latency-us is a time of at least 0 microseconds, not {self.latency_us:g}"
            )
        if not 0 < self.bandwidth_gbs < math.inf:
            raise ValueError(
                f"--bandwidth-gbs is a positive number of 10⁹ bytes per second, not {self.bandwidth_gbs:g}"
            )

    def all_reduce(self, size: float, gpus: int) -> float:
        """ρ(size), in seconds."""
        hops = (
            gpus - 1
            if self.reduction == "ring"
            else math.ceil(math.log2(gpus))
        )
        return (
            2 * (gpus - 1) / gpus * size / (1e9 * self.bandwidth_gbs)
            + 2e-6 * hops * self.latency_us
        )

    def all_to_all(self, size: float, gpus: int) -> float:
        """τ(size), in seconds."""
        return (gpus - 1) / gpus * size / (1e9 * self.bandwidth_gbs) + 1e-6 * (
            gpus - 1
        ) * self.latency_us


@dataclass(frozen=True)
class Method:
    """SENG's sizes."""

    k: int = 16
    """Directions of a layer's basis."""
    every: int = 200
    """T: steps from refresh to refresh."""
    samples: int = 256
    """ϱ: samples of a GPU at a refresh."""
    sketch_rows: int = 2048
    """q: numbers of a sample's gradient that a layer's sketch keeps."""
    number_bytes: int = 4
    """b: bytes per number of gradients and sketches."""
    basis_bytes: int = 2
    """b_Q: bytes per number of a basis."""
    overlap: float = 0.7
    """The share of the gradient's reduction that is hidden behind the backward."""

    def __post_init__(self) -> None:
        for name in (
            "k",
            "every",
            "samples",
            "sketch_rows",
            "number_bytes",
            "basis_bytes",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} is a count of at least 1, not {getattr(self, name)}"
                )
        if not 0 <= self.overlap <= 1:
            raise ValueError(
                f"--overlap is a share between 0 and 1, not {self.overlap:g}"
            )


def layers(model: nn.Module) -> list[int]:
    """n_l: the numbers of each layer, those that two layers share counted once."""
    seen: set[nn.Parameter] = set()
    out = []
    for module in model.modules():
        own = [
            p
            for p in module.parameters(recurse=False)
            if p.requires_grad and p not in seen
        ]
        seen.update(own)
        out += [sum(p.numel() for p in own)] if own else []
    return out


@dataclass(frozen=True)
class Projection:
    """All that a step's time hangs on."""

    sizes: Sequence[int]  # n_l
    compute: Compute
    link: Link
    method: Method

    @property
    def gradient(self) -> int:
        """g: bytes of all gradients."""
        return self.method.number_bytes * sum(self.sizes)

    @property
    def basis(self) -> int:
        """Bytes that a refresh all-reduces under `shared`."""
        return self.method.basis_bytes * sum(
            min(self.method.k, n) * n for n in self.sizes
        )

    @property
    def sketches(self) -> int:
        """Bytes that a GPU has for the layers' owners at a refresh under `shared`."""
        return self._of_samples(self.method.sketch_rows)

    @property
    def directions(self) -> int:
        """Bytes that the owners have for a GPU then: V_i, of its samples."""
        return self._of_samples(self.method.k)

    def _of_samples(self, rows: int) -> int:
        return (
            self.method.number_bytes
            * self.method.samples
            * sum(min(rows, n) for n in self.sizes)
        )

    def per_step(self, method: str) -> float:
        """Bytes that a GPU gives to collectives, a refresh spread over T steps."""
        extra = {
            "SGD": 0.0,
            "shared": (self.basis + self.sketches + self.directions)
            / self.method.every,
        }
        return self.gradient + extra.get(method, self.gradient)

    def exposed(self, size: float, gpus: int) -> float:
        """ε(size): seconds of an all-reduce beside the backward that the backward does not hide."""
        whole = self.link.all_reduce(size, gpus)
        return whole - min(
            self.method.overlap * whole, BACKWARD * self.compute.step
        )

    def seconds(self, method: str, gpus: int) -> float:
        """Of a step, a refresh spread over T of them."""
        c, g, T = self.compute, self.gradient, self.method.every
        if method == "SGD":
            return c.step + self.exposed(g, gpus)
        ours = c.step + c.solve + c.refresh / T
        if method == "lagged":
            return ours + self.exposed(2 * g, gpus)
        if method == "block":
            return ours + self.exposed(g, gpus) + self.link.all_reduce(g, gpus)
        to_owners = self.link.all_to_all(
            self.sketches, gpus
        ) + self.link.all_to_all(self.directions, gpus)
        refresh = self.link.all_reduce(self.basis, gpus) + to_owners
        return ours + self.exposed(g, gpus) + refresh / T

    def efficiency(self, method: str, gpus: int, base: int) -> float:
        """Beside `base` GPUs."""
        return self.seconds(method, base) / self.seconds(method, gpus)
