"""The paper's own setting: absolute λ = 1, U from one batch, T = 200, exp schedule and decaying damping; S̃_k apart from S_k."""

import torch
from seng.schedules import DampingSchedule, damping, exp, schedule_lr
from torch import nn

import seng

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3),
    nn.BatchNorm2d(8),
    nn.ReLU(inplace=True),
    nn.Flatten(),
    nn.Linear(8 * 36, 10),
)
x, y = torch.randn(640, 1, 8, 8), torch.randint(10, (640,))

paper = seng.presets.paper(
    damping=1.0, refresh_every=200, sketch=seng.sketch.Rows(64)
)
opt = seng.SENG(model, lr=0.05, weight_decay=5e-4, **paper)
steps_per_epoch, epochs = 10, 6
lr = schedule_lr(
    opt, lambda epoch, lr: exp(epoch, lr, epochs=75, rate=5), steps_per_epoch
)
lam = DampingSchedule(
    opt,
    lambda epoch, initial: damping(epoch, initial, gamma=0.9),
    steps_per_epoch,
)

for _ in range(epochs):
    for batch in torch.randperm(640).view(steps_per_epoch, 64):
        if opt.refresh_due:  # a batch of its own for the curvature, independent of the gradient's
            other = torch.randint(640, (64,))
            with opt.curvature_batch():
                nn.functional.cross_entropy(
                    model(x[other]), y[other]
                ).backward()
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        opt.step()
        lr.step()
        lam.step()
print(f"final loss {loss.item():.4f}")
