"""Columns of U that do not come from the training loss: from the output's Jacobian, or from labels
drawn from the model.

    gauss-newton   u = J_iᵀh for every column h of H_i^{1/2}:
                   M = (1/B) Σ_i J_iᵀH_iJ_i  (U = Jᵀ for squares, section 5.2)
    sampled        u = J_iᵀs, s = ∇_f log p(y | f_i) with y drawn from the model:
                   E M = the same, the true Fisher matrix

H_i is the Hessian of one sample's loss at the output f_i, so it has to be known which loss that is:

    "squares"        ½‖f − y‖²: H = I                        (nn.MSELoss is 2/C of it)
    "cross-entropy"  −log softmax(f)_y: H = diag(p) − ppᵀ, whose columns √p_c(e_c − p) need no
                     factorization
    "bernoulli"      a binary cross-entropy for each output, added up: H = diag(p(1 − p))

An output with positions, (B, …, C), or (B, C, h, w) for images, has the mean over them as its
sample's loss. When the module has been called on a refresh step, its output is sent backward once
for every column, and what the layers capture then is U. The training backward is not captured.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from seng.layers.capture import Inert, transformed
from seng.linalg.operators import wide

Fisher = Literal["empirical", "gauss-newton", "sampled"]
Loss = Literal["squares", "cross-entropy", "bernoulli"]
MOST = 1024  # backwards of one refresh


def seeds(
    out: Tensor, fisher: Fisher, loss: Loss, generator: torch.Generator
) -> Iterator[Tensor]:
    """What to send backward from the output f, one after the other: columns of H^{1/2}, or one
    draw.
    """
    f = out.detach()
    if f.dim() > 3:
        f = f.movedim(1, -1)
    elif f.dim() == 1:
        f = f[:, None]
    p = f.to(wide(f.dtype))
    if loss == "cross-entropy":
        p = p.softmax(-1)
    elif loss == "bernoulli":
        p = p.sigmoid()
    if fisher == "sampled":
        columns: Iterable[Tensor] = [_drawn(p, loss, generator)]
    else:
        columns = _columns(p, loss)
    positions = f[0, ..., 0].numel()
    for h in columns:
        h = (h / positions**0.5).to(f.dtype)
        if out.dim() > 3:
            yield h.movedim(-1, 1)
        else:
            yield h.view(out.shape)


def _columns(p: Tensor, loss: Loss) -> Iterator[Tensor]:
    """√m·H^{1/2}, column by column: U divides by the number of its columns, which are m for every
    sample.
    """
    flat = p.reshape(len(p), -1, p.shape[-1])  # (B, positions, C)
    positions, C = flat.shape[1:]
    m = positions * C
    if m > MOST:
        raise ValueError(
            f"fisher='gauss-newton' sends the output backward once for each of its {m} numbers per "
            f"sample, which is more than {MOST}: use fisher='sampled'"
        )
    for t, c in itertools.product(range(positions), range(C)):
        h = torch.zeros_like(flat)
        h[:, t, c] = 1
        if loss == "bernoulli":
            h *= (flat * (1 - flat)).sqrt()
        elif loss == "cross-entropy":
            q = flat[:, t]  # (B, C)
            root = q[:, c, None].sqrt()
            h[:, t] = (h[:, t] - q) * root
        yield m**0.5 * h.view_as(p)


def _drawn(p: Tensor, loss: Loss, generator: torch.Generator) -> Tensor:
    """∇_f of the loss with labels that the model itself gives."""
    if loss == "squares":
        return torch.empty_like(p).normal_(generator=generator)
    if loss == "bernoulli":
        return p - torch.bernoulli(p, generator=generator)
    y = torch.multinomial(p.flatten(0, -2), 1, generator=generator)
    y = y.view(*p.shape[:-1], 1)
    return p.scatter_add(-1, y, -torch.ones_like(p[..., :1]))


def output_of(out: Any) -> Tensor:
    """The tensor that a module returned, or its logits."""
    f = out if isinstance(out, Tensor) else getattr(out, "logits", None)
    if not isinstance(f, Tensor) or not f.dim() or not f.is_floating_point():
        raise TypeError(
            "fisher='gauss-newton' and 'sampled' start from the module's output, which has to be "
            "one tensor with the sample as dimension 0, or have one as .logits; here it is "
            f"{type(out).__name__}: use fisher='empirical'"
        )
    return f


class Observer(Inert):
    """A forward hook on the whole module, which hands over its output; in a copy of the module it
    does nothing.
    """

    def __init__(
        self, module: nn.Module, observe: Callable[[Any], None]
    ) -> None:
        self.observe = weakref.WeakMethod(observe)
        handle = module.register_forward_hook(self)
        owner = observe.__self__  # type: ignore[attr-defined]
        weakref.finalize(owner, handle.remove).atexit = False

    def __call__(self, module: nn.Module, args: Any, out: Any) -> None:
        observe = self.observe()
        if observe is None or not torch.is_grad_enabled():
            return
        if not (torch.compiler.is_compiling() or transformed()):
            observe(out)
