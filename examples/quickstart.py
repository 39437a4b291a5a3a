"""The smallest use: one line of an ordinary training loop is SENG's."""

import torch
from torch import nn

import seng

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(20, 64), nn.ReLU(inplace=True), nn.Linear(64, 1)
)
x = torch.randn(512, 20)
y = x[:, :5].prod(1, keepdim=True).tanh()

opt = seng.SENG(
    model, lr=0.1, weight_decay=1e-4
)  # was: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, …)

print(seng.explain(model, x[:64]))
for step in range(200):
    batch = torch.randint(512, (64,))
    loss = nn.functional.mse_loss(model(x[batch]), y[batch])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 50 == 0:
        print(f"step {step:3d}  loss {loss.item():.4f}")
print(f"final loss {nn.functional.mse_loss(model(x), y).item():.4f}")
