"""Lightning: configure_optimizers returns SENG; accumulation, clipping and the scheduler are the Trainer's as ever."""

import logging
import warnings

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from torch.utils.data import DataLoader, TensorDataset

import seng

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
# It would like more workers and a logger.
warnings.filterwarnings("ignore", module="lightning")


class Digits(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        conv = nn.Sequential(
            nn.Conv2d(1, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.net = nn.Sequential(conv, nn.Flatten(), nn.Linear(16 * 9, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(
        self,
    ) -> tuple[list[seng.SENG], list[LRScheduler]]:
        # was: torch.optim.SGD(self.parameters(), lr=0.1, …)
        opt = seng.SENG(self, lr=0.1, weight_decay=1e-4)
        return [opt], [CosineAnnealingLR(opt, self.trainer.max_epochs)]


torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8) / 16
quiet = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
trainer = L.Trainer(
    max_epochs=6,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    accelerator="cpu",
    **quiet,
)
train = TensorDataset(x[:1500], y[:1500])
trainer.fit(model := Digits(), DataLoader(train, 64, shuffle=True))
report = trainer.optimizers[0].diagnostics()
print({name: layer["form"] for name, layer in report.items()})
# On digits it has not seen:
final = model.eval().training_step([x[1500:], y[1500:]], 0).item()
print(f"final loss {final:.4f}")
