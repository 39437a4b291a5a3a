"""What the curvature looks like: one line for TensorBoard, and the same numbers as a table."""

import tempfile

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import seng

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8) / 16
model = nn.Sequential(
    *(
        nn.Conv2d(1, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
    ),
    *(
        nn.Flatten(),
        nn.Linear(144, 32),
        nn.ReLU(inplace=True),
        nn.Linear(32, 10),
    ),
)
opt = seng.SENG(
    model, lr=0.03, curvature=seng.Curvature(sketch=seng.sketch.Rows(128))
)

with (
    tempfile.TemporaryDirectory() as folder,
    SummaryWriter(folder) as writer,
):  # for you: SummaryWriter("runs/mine")
    opt.register_step_post_hook(seng.TensorBoard(writer))  # the one line
    for _ in range(100):
        batch = torch.randint(1500, (64,))
        opt.zero_grad()
        nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
        opt.step()

numbers = (
    "effective_rank",
    "top_eigenvalue",
    "damping",
    "cosine",
    "norm_ratio",
    "sketch_error",
    "bytes",
)
print("layer ", *(f"{name:>14}" for name in numbers))
for layer, entry in opt.diagnostics().items():
    print(f"{layer:6}", *(f"{entry[name]:14.3g}" for name in numbers))
with torch.no_grad():
    print(
        f"final loss {nn.functional.cross_entropy(model.eval()(x[1500:]), y[1500:]).item():.4f}"
    )
