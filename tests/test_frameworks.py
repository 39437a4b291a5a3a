"""SENG inside Lightning, Accelerate and the Hugging Face Trainer is SENG in a plain loop: same parameters, same curvature.

The plain loop takes each step on one large batch, so accumulation, clipping and schedules have to come out right too. λ is
absolute here, since a relative one would forgive a wrong scale of the captures. Checkpoints are written between two refreshes
and resumed by a model of another initialization.
"""

import logging

import lightning as L
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.pytorch.plugins import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Trainer,
    TrainingArguments,
)

import seng
from seng.tell.inspection import inspect

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning:lightning", "ignore::FutureWarning:lightning"
)

OPTIONS = {
    "lr": 0.1,
    "damping": 0.05,
    "refresh_every": 5,
    # P⁻¹ stretches the rounding of half precision, the more the lower its floor.
    "curvature": seng.Curvature(
        relative_damping=False,
        samples=16,
        base=seng.Kronecker(floor=0.1),
    ),
}
CLIP = 0.5
TOKENS = torch.stack(
    [(torch.arange(9) * (2 + i % 3) + i) % 11 for i in range(48)]
)  # counting modulo eleven


@pytest.fixture(autouse=True)
def _forget_accelerate():
    """Accelerate keeps precision and accumulation in singletons, which the next test must not find."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3)
    )


def data(batch):
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch)


def language_model(seed=0):
    """Linear, LayerNorm, and an Embedding that is tied to the head."""
    torch.manual_seed(seed)
    shape = {
        "vocab_size": 11,
        "hidden_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    return GPTNeoXForCausalLM(GPTNeoXConfig(**shape, tie_word_embeddings=True))


def loss_of(model, batch):
    if isinstance(batch, torch.Tensor):
        return model(input_ids=batch, labels=batch).loss
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def linear_to_zero(opt, steps):
    return torch.optim.lr_scheduler.LambdaLR(
        opt, lambda step: 1 - step / steps
    )


def plain_loop(model, batches, make=seng.SENG, **options):
    """The reference: one large batch a step."""
    opt = make(model, **OPTIONS | options)
    schedule = linear_to_zero(opt, len(batches))
    for batch in batches:
        opt.zero_grad()
        loss_of(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        opt.step()
        schedule.step()
    return model, opt


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def assert_same(model, opt, want, want_opt, *, steps, tolerance=1e-10):
    ours, theirs = inspect(opt), inspect(want_opt)
    assert ours.steps == theirs.steps == steps
    assert (
        set(ours.states) == set(theirs.states) == set(range(len(ours.sites)))
    )
    assert "plain" not in {
        layer["form"] for layer in opt.diagnostics().values()
    }
    torch.testing.assert_close(
        vector(model), vector(want), rtol=tolerance, atol=tolerance
    )
    for index, state in ours.states.items():
        torch.testing.assert_close(
            state.top, theirs.states[index].top, rtol=tolerance, atol=tolerance
        )


def test_the_comparison_can_fail():
    """It would notice no curvature, the curvature of half a batch, and that of half the loss, whose M is a quarter."""
    batches = [*data(8)] * 2
    want, _ = plain_loop(network(), batches)
    half = {"curvature": seng.Curvature(relative_damping=False, samples=4)}
    quarter = {"damping": 4 * OPTIONS["damping"]}
    sgd = {
        "make": lambda model, lr, **_: torch.optim.SGD(
            model.parameters(), lr, 0.9
        )
    }
    for options in (half, quarter, sgd):
        other, _ = plain_loop(network(), batches, **options)
        assert (vector(other) - vector(want)).norm() > 0.01 * (
            vector(want) - vector(network())
        ).norm()


class Lit(L.LightningModule):
    def __init__(self, seed=0, steps=12, **options):
        super().__init__()
        self.net, self.steps, self.options = (
            network(seed),
            steps,
            OPTIONS | options,
        )

    def training_step(self, batch, _):
        return loss_of(self.net, batch)

    def configure_optimizers(self):
        opt = seng.SENG(self, **self.options)
        return [opt], [
            {"scheduler": linear_to_zero(opt, self.steps), "interval": "step"}
        ]


def fit(module, epochs=2, ckpt_path=None, **options):
    """Two micro-batches of four a step."""
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    if module.automatic_optimization:
        options |= {"accumulate_grad_batches": 2, "gradient_clip_val": CLIP}
    trainer = L.Trainer(
        max_epochs=epochs, accelerator="cpu", **quiet, **options
    )
    trainer.fit(module, data(4), ckpt_path=ckpt_path)
    return module, trainer.optimizers[0]


@pytest.mark.parametrize("refresh_every", [1, 5])
def test_lightning_is_the_plain_loop(refresh_every):
    """It runs the backward inside step(closure)."""
    want = plain_loop(network(), [*data(8)] * 2, refresh_every=refresh_every)
    assert_same(*fit(Lit(refresh_every=refresh_every)), *want, steps=12)


def test_lightning_resumes_from_its_checkpoint(tmp_path):
    want = fit(Lit(steps=24), epochs=4)
    half, _ = fit(Lit(steps=24))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert_same(
        *fit(Lit(3, steps=24), epochs=4, ckpt_path=tmp_path / "half.ckpt"),
        *want,
        steps=24,
        tolerance=0,
    )


class Manual(Lit):
    def training_step(self, batch, i):
        opt, schedule = self.optimizers(), self.lr_schedulers()
        if i % 2 == 0:
            opt.zero_grad()
        self.manual_backward(loss_of(self.net, batch) / 2)
        if i % 2 == 1:
            self.clip_gradients(opt, CLIP, "norm")
            opt.step()
            schedule.step()


def test_lightning_with_manual_optimization():
    module = Manual()
    module.automatic_optimization = False
    assert_same(*fit(module), *plain_loop(network(), [*data(8)] * 2), steps=12)


class Thaw(Lit):
    """The last layer alone in the first epoch, then all of them."""

    def configure_optimizers(self):
        return seng.SENG(self.net[3].parameters(), module=self, **self.options)

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.optimizers().add_param_group(
                {"params": list(self.net[:3].parameters())}
            )


def test_lightning_adds_a_param_group():
    """Through a wrapper that subclasses SENG and reads through to it: what is assigned there does not reach the optimizer."""
    module, opt = fit(Thaw())
    assert inspect(opt).steps == 12
    assert set(inspect(opt).states) == {0, 1, 2}
    assert all(
        (p != q).any()
        for p, q in zip(
            module.parameters(), network().parameters(), strict=True
        )
    )


def accelerated(steps, seed=0, refresh_every=5, **options):
    accelerator = Accelerator(cpu=True, **options)
    opt = seng.SENG(
        model := network(seed), **OPTIONS | {"refresh_every": refresh_every}
    )
    return accelerator, *accelerator.prepare(
        model, opt, data(4), linear_to_zero(opt, steps)
    )


def loop(accelerator, model, opt, loader, schedule):
    for _ in range(2):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                opt.step()
                schedule.step()
                opt.zero_grad()
    return model, opt.optimizer


@pytest.mark.parametrize("k", [1, 2, 4])
def test_accelerate_takes_the_curvature_of_all_micro_batches(k):
    got = loop(
        *accelerated(24 // k, refresh_every=1, gradient_accumulation_steps=k)
    )
    assert_same(
        *got,
        *plain_loop(network(), [*data(4 * k)] * 2, refresh_every=1),
        steps=24 // k,
    )


def test_accelerate_resumes_from_its_state(tmp_path):
    run, again = (
        accelerated(24, seed, gradient_accumulation_steps=2) for seed in (0, 3)
    )
    loop(*run)
    run[0].save_state(tmp_path)
    want = loop(*run)
    again[0].load_state(tmp_path)
    assert_same(*loop(*again), *want, steps=24, tolerance=0)


WAYS = ("optimizers", "optimizer_cls_and_kwargs")


def train(folder, way="optimizers", seed=0, resume=None, **options):
    """Twelve steps of the Trainer, two micro-batches of four each; its schedule is linear to zero by default."""
    model = language_model(seed)
    how = (
        (seng.SENG(model, **OPTIONS), None)
        if way == "optimizers"
        else (seng.SENG, {"module": model, **OPTIONS})
    )
    batch = {
        "max_steps": 12,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": CLIP,
    }
    order = {"train_sampling_strategy": "sequential", "seed": 0}
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
    }
    args = TrainingArguments(
        folder, **batch, **order, **quiet, **{"save_strategy": "no"} | options
    )
    pairs = [{"input_ids": tokens, "labels": tokens} for tokens in TOKENS]
    trainer = Trainer(model, args, train_dataset=pairs, **{way: how})
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer.optimizer.optimizer


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_trainer_is_the_plain_loop(way, gradient_checkpointing, tmp_path):
    """Both ways; it divides the loss by all the tokens of a step, and lets go of gradients by model.zero_grad()."""
    got = train(tmp_path, way, gradient_checkpointing=gradient_checkpointing)
    assert_same(
        *got, *plain_loop(language_model(), [*TOKENS.split(8)] * 2), steps=12
    )


@pytest.mark.parametrize("way", WAYS)
def test_trainer_resumes_from_its_checkpoint(way, tmp_path):
    want = train(tmp_path, way, save_strategy="steps", save_steps=7)
    assert_same(
        *train(tmp_path, way, seed=3, resume=tmp_path / "checkpoint-7"),
        *want,
        steps=12,
        tolerance=0,
    )


def rounded(framework, folder):
    if framework == "lightning-16":  # with a GradScaler, on the CPU too
        return fit(Lit(), plugins=MixedPrecision("16-mixed", "cpu"))
    if framework == "lightning":
        return fit(Lit(), precision="bf16-mixed")
    if framework == "accelerate":
        return loop(
            *accelerated(
                12, gradient_accumulation_steps=2, mixed_precision="bf16"
            )
        )
    return train(folder, bf16=True)


@pytest.mark.parametrize(
    "framework", ["lightning", "lightning-16", "accelerate", "trainer"]
)
def test_mixed_precision_goes_nearly_the_same_way(framework, tmp_path):
    torch.set_default_dtype(torch.float32)
    model, opt = rounded(framework, tmp_path)
    start, batches = (
        (language_model(), TOKENS.split(8))
        if framework == "trainer"
        else (network(), data(8))
    )
    before = vector(start)
    want, want_opt = plain_loop(start, [*batches] * 2)
    assert vector(model).dtype == torch.float32
    assert (vector(model) - vector(want)).norm() < 0.1 * (
        vector(want) - before
    ).norm()
    assert len(inspect(opt).states) == len(inspect(opt).sites)
    for index, block in inspect(opt).states.items():
        torch.testing.assert_close(
            block.top, inspect(want_opt).states[index].top, rtol=0.1, atol=0
        )
