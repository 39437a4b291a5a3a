"""SENG's preconditioning in front of another optimizer: AdamW sees λ(M + λI)⁻¹g instead of g."""

import torch
from torch import nn

import seng

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv1d(1, 16, 5, padding=2),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(16 * 32, 4),
)
x = torch.randn(256, 1, 32)
y = (
    x.square().sum((1, 2)).argsort().argsort() * 4 // 256
)  # which quarter of the batch's energies

adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
handle = seng.attach(adamw, model, damping=0.1, refresh_every=10)

for _ in range(100):
    batch = torch.randint(256, (64,))
    loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
    adamw.zero_grad()
    loss.backward()
    adamw.step()
print(f"final loss {loss.item():.4f}")

checkpoint = {
    "model": model.state_dict(),
    "adamw": adamw.state_dict(),
    "seng": handle.state_dict(),
}
handle.remove()  # from here on it is AdamW alone
