"""The factors of one K-FAC block (Martens & Grosse 2015; for convolutions, KFC: Grosse & Martens 2016).

A layer's block of the Fisher matrix is taken as A ⊗ G. A sample has κ positions (κ = 1 for a linear layer on vectors); at
each the layer has an input a_t, with a 1 appended for the bias, and the gradient g_t = B × captured of its output:

    A = E Σ_t a_t a_tᵀ  (n_A, n_A)          summed over positions, mean over samples
    G = E (1/κ) Σ_t g_t g_tᵀ  (n_G, n_G)    mean over positions and samples

E is over the step's samples with the loss's own gradients (the empirical Fisher): no second backward with drawn labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.modules.conv import _ConvTransposeNd

from seng.layers.capture import accumulates
from seng.layers.sites import Site

Pair = tuple[Tensor, Tensor]  # of G's and of A's size


def why_plain(site: Site) -> str | None:
    """Why K-FAC leaves a site to the plain gradient, or None."""
    if len(site.members) > 1:
        return "layers that share a parameter"
    module = site.members[0].module
    if not site.factored or isinstance(module, _ConvTransposeNd):
        return type(module).__name__
    return "grouped convolution" if site.segments[0].shape[0] > 1 else None


class Moments:
    """What waits until step(): per site Σ g gᵀ, Σ a aᵀ and the number of positions, over all backwards since the last one."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = sites
        self.sums: dict[int, tuple[Tensor, Tensor, int]] = {}
        self.counts: dict[
            int, Counter[int]
        ] = {}  # backward -> how many calls of layers saw so many samples

    def clear(self) -> None:
        self.sums.clear()
        self.counts.clear()

    @property
    def samples(self) -> int:
        """B: for each backward the sample count that most layers saw; what else a dimension 0 holds are positions."""
        return sum(counts.most_common(1)[0][0] for counts in self.counts.values())

    def factors(self, index: int, scale: float) -> Pair | None:
        """G and A of a site, from a loss that was multiplied by `scale`; None where there are no samples or no finite ones."""
        B, (G, A, positions) = self.samples, self.sums[index]
        if not (B and positions):
            return None
        pair = G * ((B / scale) ** 2 / positions), A / B
        return pair if all(bool(x.isfinite().all()) for x in pair) else None

    def receive(
        self, task: int, index: int, training: bool, own: bool, a: Tensor, g: Tensor
    ) -> None:
        """Called inside the backward, once per call of a layer: the calls' positions add up."""
        site, (member,) = self.sites[index], self.sites[index].members
        if not any(accumulates(s.param) for s in site.active()):
            return
        if task not in self.counts:
            if self._stale():
                self.clear()
            self.counts[task] = Counter()
        a, g = member.sample_first(a, g)
        self.counts[task][len(a)] += 1
        seen = member.kind.rule(member.module, a, g)  # Ĝ (ϱ, n_G, κ), Â (ϱ, n_A, κ)
        assert isinstance(seen, tuple)
        # As rows (ϱκ, n_G) and (ϱκ, n_A), and wide: half precision is enough for a and g, not for sums of their products.
        G, A = (
            (x.mT.flatten(0, 1) if x.dim() == 3 else x).to(site.dtype) for x in seen
        )
        names = [s.name for s in site.segments]
        fresh = (
            G.T @ G,
            _gram(A if "weight" in names else A[:, :0], "bias" in names),
            len(G),
        )
        waiting = self.sums.get(index)
        self.sums[index] = (
            fresh
            if waiting is None
            else (waiting[0] + fresh[0], waiting[1] + fresh[1], waiting[2] + fresh[2])
        )

    def _stale(self) -> bool:
        """Whether the gradients that belong to the sums are gone, as after a step that was skipped."""
        grads = [s.param.grad for i in self.sums for s in self.sites[i].active()]
        if any(g is not None and bool(g.any()) for g in grads):
            return False
        return all(g is None for g in grads) or any(
            bool(G.any()) for G, _, _ in self.sums.values()
        )


def _gram(A: Tensor, ones: bool) -> Tensor:
    """AᵀA (n_A, n_A) of A (positions, n_A), with a column of ones appended to A or without."""
    if not ones:
        return A.T @ A
    out = pad(A.T @ A, (0, 1, 0, 1), value=len(A))
    out[-1, :-1] = out[:-1, -1] = A.sum(0)
    return out


def damped_inverses(G: Tensor, A: Tensor, damping: float) -> Pair | None:
    """(G + √λ/π I)⁻¹ and (A + π√λ I)⁻¹ with π² = (tr A / n_A) / (tr G / n_G); None where there are none."""
    pi = (A.trace() / len(A) / (G.trace() / len(G))).sqrt()
    pi = torch.where(
        pi.isfinite() & (pi > 0), pi, 1.0
    )  # a layer without gradients, or without inputs
    inverses = _inverse(G, damping**0.5 / pi), _inverse(A, damping**0.5 * pi)
    return (
        None
        if inverses[0] is None or inverses[1] is None
        else (inverses[0], inverses[1])
    )


def _inverse(M: Tensor, shift: Tensor) -> Tensor | None:
    """(M + shift·I)⁻¹; a shift that is lost in rounding grows until the Cholesky factorization exists."""
    for _ in range(6):
        L, info = torch.linalg.cholesky_ex(
            M + shift * torch.eye(len(M), dtype=M.dtype, device=M.device)
        )
        if not info and bool((inverse := torch.cholesky_inverse(L)).isfinite().all()):
            return inverse
        shift = torch.maximum(10 * shift, torch.finfo(M.dtype).eps * M.trace())
    return None
