"""What gathers the per-sample gradients of a module: its hooks, what they have captured, and when.

On refresh steps backwards are captured. `own_batch` lets backwards feed the curvature alone (the
paper's S̃_k). With `fisher` other than "empirical" the module's output goes backward for the
curvature alone (`seng.layers.fisher`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from seng.layers.capture import Capture, loss_scale
from seng.layers.fisher import Fisher, Loss, Observer, output_of, seeds
from seng.layers.samples import Keep, Samples
from seng.layers.sites import Site


class Collector:
    """Hooks on the layers of some sites, and the samples that they hand over."""

    def __init__(
        self,
        module: nn.Module,
        sites: list[Site],
        *,
        limit: int | None,
        keep: Callable[[], Keep | None],
        fisher: Fisher,
        loss: Loss,
        stream: Callable[[int], int],
        per_sample: bool = True,
    ) -> None:
        self.module, self.fisher, self.loss, self.stream = (
            module,
            fisher,
            loss,
            stream,
        )
        self.own = (
            False  # whether this step's curvature has a batch of its own
        )
        observed = fisher != "empirical"
        self.samples = Samples(sites, limit, keep, observed, per_sample)
        layers = [member.module for _, member in self.samples.layers]
        self.capture = Capture(layers, self.samples.receive)
        self.observer = (
            Observer(module, WeakMethod(self._observe)) if observed else None
        )

    def arm(self, due: bool) -> None:
        """Begin a step, which is captured if a refresh is due."""
        self.samples.clear()
        self.own = self.samples.own = self.capture.own = False
        self.capture.armed = due

    def drop(self) -> None:
        """Forget what was captured: the gradients it belongs to are gone."""
        if self.own:
            return
        if self.samples.gated:
            self.samples.forget(
                trained=True
            )  # what is still to go backward stays
        else:
            self.samples.clear()

    def remove(self) -> None:
        """Leave the module as it was."""
        self.capture.remove()

    @property
    def scale(self) -> float:
        """Of the loss, which the captured gradients carry."""
        unscaled = self.own or self.observer is not None
        return 1.0 if unscaled else loss_scale()

    def _observe(self, out: Any) -> None:
        """The module was called: on a refresh step send its output backward."""
        if not self.capture.armed:
            return
        f = output_of(out)
        if not f.requires_grad:
            return
        segments = [s for site in self.samples.sites for s in site.segments]
        params = [s.param for s in segments if s.param.requires_grad]
        if not params:
            return
        seed = self.stream(len(self.samples.forwards))
        generator = torch.Generator(f.device).manual_seed(seed)
        with self.samples.listened(f.shape[0]) as forward:
            for h in seeds(f, self.fisher, self.loss, generator):
                torch.autograd.grad(
                    f, params, h, retain_graph=True, allow_unused=True
                )
        f.register_hook(lambda _: setattr(forward, "trained", True))

    @contextmanager
    def own_batch(self, params: Sequence[nn.Parameter]) -> Iterator[None]:
        """Backwards in here feed only the curvature; gradients stay as they were."""
        # DDP may reduce into what gradients are views of.
        wrapped = isinstance(self.module, nn.parallel.DistributedDataParallel)
        kept = []
        for p in params:
            kept.append(
                p.grad.clone() if wrapped and p.grad is not None else p.grad
            )
            p.grad = None
        self.samples.clear()
        self.own = self.samples.own = self.capture.own = self.capture.armed = (
            True
        )
        try:
            yield
        finally:
            self.capture.own = False
            self.capture.armed = self.capture.armed and not self.own
            for p, grad in zip(params, kept, strict=True):
                p.grad = grad
