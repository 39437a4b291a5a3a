"""Loss and gradients of a batch as one CUDA graph. Forward and backward of a small network are hundreds of launches, and a GPU
waits for them; replayed, a step takes as long as the GPU needs, whatever the host is doing, and two timings agree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from seng.gpu.recorder import side_stream
from seng.lab.problems import Batch


class Graphed:
    """Forward and backward, recorded at the first call. All batches have one shape, and nobody looks into the backward."""

    def __init__(
        self, params: Sequence[nn.Parameter], loss: Callable[[Batch], Tensor]
    ) -> None:
        self.params, self.loss = params, loss
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, batch: Batch) -> Tensor:
        """The loss; gradients are left where a backward leaves them, and hold until the next call."""
        if self.graph is None:
            self._record(batch)
        assert self.graph is not None
        for place, given in zip(self.batch, batch, strict=True):
            place.copy_(given)
        self.graph.replay()
        for p, grad in zip(self.params, self.grads, strict=True):
            p.grad = grad
        return self.value.clone()

    def _record(self, batch: Batch) -> None:
        x, y = batch
        self.batch = torch.empty_like(x), torch.empty_like(y)
        self.graph = torch.cuda.CUDAGraph()
        for p in self.params:
            p.grad = None  # so that a replay overwrites gradients, and does not add to them
        with torch.cuda.graph(
            self.graph,
            stream=side_stream(x.device),
            capture_error_mode="thread_local",
        ):
            loss = self.loss(self.batch)
            loss.backward()
        self.value, self.grads = loss.detach(), [p.grad for p in self.params]
