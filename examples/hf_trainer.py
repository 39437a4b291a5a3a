"""transformers.Trainer, both ways: an optimizer that is ready, or a class and its arguments. It learns the licence's text."""

import tempfile
from pathlib import Path

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Trainer,
    TrainingArguments,
)

import seng

licence = Path(__file__).parent.parent / "LICENSE"
text = torch.tensor(list(licence.read_bytes()))
blocks = [
    {"input_ids": block, "labels": block} for block in text.unfold(0, 64, 32)
]
shape = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
}
batch = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
quiet = {
    "save_strategy": "no",
    "logging_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
}

frequency = text.bincount()[text.unique()] / len(text)
entropy = -(frequency * frequency.log()).sum()
print(f"the frequencies of the letters alone: loss {entropy:.4f}")

WAYS = (
    lambda model: {
        "optimizers": (seng.SENG(model, lr=0.3), None)
    },  # None: the Trainer's schedule, linear to zero
    # `module`, since the Trainer takes `model` for itself; and weight_decay belongs to its arguments, which overrule ours
    lambda model: {
        "optimizer_cls_and_kwargs": (seng.SENG, {"module": model, "lr": 0.3})
    },
)
losses = []
for way in WAYS:
    torch.manual_seed(0)
    model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape))
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=100, use_cpu=True, seed=0, **batch, **quiet
        )
        trainer = Trainer(
            model,
            args,
            train_dataset=blocks,
            eval_dataset=blocks,
            **way(model),
        )
        trainer.train()
        losses.append(trainer.evaluate()["eval_loss"])
    # The Trainer's is Accelerate's wrapper around SENG.
    opt = trainer.optimizer.optimizer
    print({name: layer["form"] for name, layer in opt.diagnostics().items()})
print(f"final loss {max(losses):.4f}")  # they are equal
