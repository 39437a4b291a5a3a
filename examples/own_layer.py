"""A layer of your own kind: five lines, and SENG covers it."""

import torch
from torch import Tensor, nn

import seng


class Gated(nn.Module):
    """y = tanh(x) Wᵀ: linear in W, so a sample's gradient is a product of two factors."""

    def __init__(self, features: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(
            torch.randn(outputs, features) / features**0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh() @ self.weight.T


@seng.layers.factors(Gated)
def _(layer: Gated, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return g[:, :, None], a.tanh()[
        :, :, None
    ]  # Ĝ (samples, n_G, κ = 1) and Â (samples, n_A, κ = 1)


torch.manual_seed(0)
model = nn.Sequential(Gated(10, 32), nn.ReLU(), nn.Linear(32, 1))
opt = seng.SENG(
    model, lr=0.05, strict=True
)  # strict: every parameter must be covered
x = torch.randn(256, 10)
y = x.sin().sum(1, keepdim=True)
for _ in range(100):
    loss = nn.functional.mse_loss(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
print(f"final loss {loss.item():.4f}")
