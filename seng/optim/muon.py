"""`Muon`, a torch optimizer: the recipe "muon" along plain gradients, without capture or hooks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from seng.checks import OF_RECIPES, OF_TORCH
from seng.layers.sites import Site, is_sharded, survey
from seng.optim.preconditioned import Group, RecipeOptimizer
from seng.recipes import muon


class Muon(RecipeOptimizer):
    """Muon for the matrices of a network, and AdamW for everything else, in one optimizer.

    A matrix steps along the polar factor of its momentum: all its singular values become about 1.
    On weights of two dimensions this is `torch.optim.Muon`. With a module, the matrices are the
    weights of its linear layers and convolutions. A kernel is flattened to (outputs, the rest), a
    kernel of h groups to h matrices. AdamW takes the last `nn.Linear` of the module (the head),
    embeddings, weights tied to either, norms, biases, bare parameters, and layers of other kinds:
    recurrent ones, `nn.MultiheadAttention`, subclasses with a forward of their own (but for those
    of `seng.layers.factors`). Without a module every parameter of two or more dimensions is a
    matrix, flattened to (shape[0], the rest).

    Args:
        params: A module, or parameters or param groups.
        lr: The learning rate of the matrices, a float or a tensor of one element.
        module: Says where the layers are, if `params` is not the module itself.
        weight_decay: Decoupled weight decay; it is multiplied by `lr`, or by `adam_lr`.
        momentum: μ of the running mean b ← μb + (1 − μ)g of a matrix's gradients g.
        nesterov: Whether to step along (1 − μ)g + μb instead of b.
        ns_coefficients: (a, b, c) of a Newton–Schulz step Y ← aY + (bS + cS²)Y with S = YYᵀ.
        eps: Before the first of these steps a matrix is divided by max(‖X‖, eps).
        ns_steps: How many of these steps are taken, in bfloat16.
        adjust_lr_fn: How far a matrix (m, n) goes. None or "original": lr·√max(1, m/n).
            "match_rms_adamw": 0.2·lr·√max(m, n), about as far as AdamW goes with the same lr.
        adam_lr: The learning rate of AdamW. None follows `lr` and its schedule: equal to it under
            "match_rms_adamw", else 0.015·lr. Schedulers do not touch a value of your own.
        adam_betas: β₁ and β₂ of AdamW.
        adam_eps: ε of AdamW.
        maximize: Whether to go uphill.

    All but `module` may differ from group to group.
    """

    def __init__(
        self,
        params: nn.Module | ParamsT,
        lr: float | Tensor = 0.02,
        *,
        module: nn.Module | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        adam_lr: float | Tensor | None = None,
        adam_betas: tuple[float, float] = (0.9, 0.95),
        adam_eps: float = 1e-8,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "adam_lr": adam_lr,
            "adam_betas": adam_betas,
            "adam_eps": adam_eps,
            "maximize": maximize,
        }
        super().__init__(params, module, muon.Muon, defaults)
        self._cover()

    def _cover(self) -> None:
        """Find the matrices among all parameters; refuse what has no step here."""
        params = self._params()
        sites: list[Site] = []
        if self.module is not None:
            sites, _ = survey(self.module, params)
        found = muon.Muon(sites, self.module)
        for p in params:
            if p.is_complex():
                raise ValueError(
                    "Muon does not support complex parameters: give them to another optimizer"
                )
            if is_sharded(p) and found.is_matrix(p):
                raise ValueError(
                    f"Muon needs whole matrices, and the one of shape {tuple(p.shape)} is spread "
                    "over ranks (a DTensor): leave it out of FSDP2 by ignored_params, use "
                    "DistributedDataParallel, or train it by AdamW"
                )
        self.recipe = found

    def __setstate__(self, state: Group) -> None:
        super().__setstate__(state)
        own = {k: v for k, v in self.defaults.items() if k not in OF_TORCH}
        foreign = {*OF_RECIPES, *OF_TORCH} - {*own}
        for group in self.param_groups:  # another optimizer's may be loaded
            for name in foreign & {*group}:
                del group[name]
            for name, value in own.items():
                group.setdefault(name, value)
        if "module" in state:  # load_state_dict comes by here too
            self._cover()
