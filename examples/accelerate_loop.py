"""Accelerate: prepare() takes SENG as it is; the curvature comes from all the micro-batches of a step."""

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import seng

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.float() / 16
loader = DataLoader(
    TensorDataset(x[:1500], y[:1500]), batch_size=25, shuffle=True
)
model = nn.Sequential(
    nn.Linear(64, 64),
    nn.LayerNorm(64),
    nn.ReLU(inplace=True),
    nn.Linear(64, 10),
)
opt = seng.SENG(
    model, lr=0.1, weight_decay=1e-4
)  # was: torch.optim.SGD(model.parameters(), lr=0.1, …)

accelerator = Accelerator(gradient_accumulation_steps=4, cpu=True)
model, opt, loader = accelerator.prepare(model, opt, loader)

for _ in range(6):
    for images, digits in loader:
        with accelerator.accumulate(
            model
        ):  # step and zero_grad act on every fourth micro-batch only
            loss = nn.functional.cross_entropy(model(images), digits)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()

print(
    {
        name: layer["form"]
        for name, layer in opt.optimizer.diagnostics().items()
    }
)  # what prepare() gave wraps SENG
with torch.no_grad():
    test = nn.functional.cross_entropy(model(x[1500:]), y[1500:])
print(f"final loss {test.item():.4f}")  # on digits it has not seen
