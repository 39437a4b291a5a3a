"""Layers of another library: a rule each for GPT-2's Conv1D (y = xW + b) and Llama's RMSNorm, and both models are covered."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.pytorch_utils import Conv1D

import seng
from seng.layers import columns, factors, positions


# The weight is (in, out), and SENG wants (1, out, in).
def rows(layer: Conv1D, name: str, p: Tensor) -> Tensor:
    return p.T[None] if name == "weight" else p[None, :, None]


def back(layer: Conv1D, name: str, d: Tensor) -> Tensor:
    return d[0].T if name == "weight" else d.flatten()


@factors(Conv1D, layout=(rows, back))
def _(layer: Conv1D, a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return positions(g).mT, positions(a).mT


@columns(LlamaRMSNorm)
def _(layer: LlamaRMSNorm, a: Tensor, g: Tensor) -> dict[str, Tensor]:
    square = a.square().mean(-1, keepdim=True) + layer.variance_epsilon
    return {"weight": positions(g * a * square.rsqrt()).sum(1)}


torch.manual_seed(0)
licence = Path(__file__).parent.parent / "LICENSE"
text = torch.tensor(list(licence.read_bytes()))
blocks = text.unfold(0, 64, 32)
shape = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
llama = LlamaForCausalLM(LlamaConfig(intermediate_size=64, **shape))
gpt2 = GPT2LMHeadModel(
    GPT2Config(n_positions=64, bos_token_id=0, eos_token_id=0, **shape)
)
# Positions are not samples: this table keeps the plain gradient.
seng.layers.arrange(gpt2.transformer.wpe, None)
losses = []
for model in (gpt2, llama):
    # strict: every parameter must be covered or left out on request.
    # At a constant 0.1 Llama's loss would jump: SGD's recipe is hard on transformers.
    opt = seng.SENG(model, lr=0.05, strict=True)
    for _ in range(200):
        batch = blocks[torch.randint(len(blocks), (16,))]
        opt.zero_grad()
        (loss := model(batch, labels=batch).loss).backward()
        opt.step()
    losses.append(loss.item())
print(f"final loss {max(losses):.4f}")
