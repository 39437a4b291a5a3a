"""torch's own optimizer cases against SENG: built as torch builds its optimizers, and with a module, where the curvature acts.

`torch.testing._internal.common_optimizers` ships inputs, schedulers and errors, but no test bodies. The bodies are ours: one
that is named as a test of torch's test/test_optim.py checks what that one checks, and `NOT_HERE` says why others do not apply.
Where torch compares two implementations of an optimizer (foreach, fused), we compare with torch's SGD, which SENG is at λ = ∞.
"""

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves
from trajectories import UNCENTRED

import seng
from seng.recipes.muon import ADAM_SHARE
from seng.tell.inspection import inspect

with mock.patch(
    "torch.backends.disable_global_flags"
):  # importing it would freeze the backends' flags for all other tests
    from torch.testing._internal import common_optimizers as cases
settings.load_profile(
    "default"
)  # and it chooses a profile of hypothesis for them

pytestmark = pytest.mark.filterwarnings("ignore:seng. no module was given")

NOT_HERE = {  # the reason -> torch's cases
    "needs two GPUs": ["forloop_goes_right_direction_multigpu"],
    "needs a GPU: test_gpu.test_a_checkpoint_moves_between_devices": [
        "state_dict_with_cuda_params"
    ],
    "is about fused and capturable, which SENG has not": [
        "cpu_load_state_dict"
    ],
    "SENG has no foreach option": [
        "foreach_large_tensor",
        "peak_memory_foreach",
        "defaults_changed_to_foreach",
    ],
    "SENG has no fused option": [
        *(
            "fused_matches_forloop",
            "fused_error_on_params_on_meta",
            "fused_large_tensor",
        ),
        *("fused_does_not_step_if_foundinf", "fused_cpu_matches_cuda"),
    ],
    "is about Adam": [
        *(
            "adamw_serialization",
            "fused_mixed_precision_state_init",
            "fused_mixed_precision_numerics",
        ),
        "fused_mixed_precision_hook_skips_existing_state",
    ],
    "is about LBFGS": ["step_iteration"],
}


def optim_inputs(device, dtype=None):
    """torch's inputs for SGD, but for the one option that SENG has not, and options of its own."""
    own = {
        "damping": {"damping": 0.3},
        "no momentum": {"momentum": 0.0},
        "refresh at every step": {"refresh_every": 1},
        "the paper's recipe": seng.presets.paper(1.0, 20),
        "uncentred over I": {"curvature": seng.Curvature(**UNCENTRED)},
        **{
            form: {"curvature": seng.Curvature(form=form, decay=0)}
            for form in ("explicit", "implicit", "merged")
        },
        "the recipe of Muon": {"recipe": "muon", "lr": 0.01},
    }
    theirs = [
        case
        for case in cases.optim_inputs_func_sgd(device, dtype)
        if "dampening" not in case.kwargs
    ]
    return theirs + [
        cases.OptimizerInput(params=None, kwargs=kwargs, desc=desc)
        for desc, kwargs in own.items()
    ]


def optim_error_inputs(device, dtype):
    """torch's errors of every optimizer, and those that its optimizers have words of their own for, in ours."""
    ours = {
        "lr must be at least 0, not -0.01": {"lr": -0.01},
        "momentum must be at least 0, not -0.5": {
            "lr": 1e-2,
            "momentum": -0.5,
        },
        "weight_decay must be at least 0, not -1": {"weight_decay": -1},
        "damping is λ, a number above 0, not 0": {"damping": 0},
    }
    wrong = {
        words: cases.OptimizerInput(params=None, kwargs=kwargs, desc=words)
        for words, kwargs in ours.items()
    }
    return cases.get_error_inputs_for_all_optims(device, dtype) + [
        cases.ErrorOptimizerInput(
            given, error_type=ValueError, error_regex=words
        )
        for words, given in wrong.items()
    ]


INFO = cases.OptimizerInfo(
    seng.SENG,
    optim_inputs_func=optim_inputs,
    optim_error_inputs_func=optim_error_inputs,
    scheduler_inputs=next(
        info.scheduler_inputs for info in cases.optim_db if info.name == "SGD"
    ),
    supported_impls=(),
    not_og_supported_flags=("maximize", "nesterov", "damping"),
)
INPUTS = cases._get_optim_inputs_including_global_cliquey_kwargs(
    "cpu", torch.float64, INFO
)
ERRORS = INFO.optim_error_inputs_func("cpu", torch.float64)
with_schedulers = pytest.mark.parametrize(
    "schedulers", INFO.scheduler_inputs, ids=range(len(INFO.scheduler_inputs))
)
named_or_not = pytest.mark.parametrize(
    "named",
    [(False, False), (False, True), (True, False), (True, True)],
    ids=str,
)


@pytest.fixture(params=["no-module", "module"])
def way(request) -> str:
    return request.param


@pytest.fixture(params=INPUTS, ids=lambda case: case.desc)
def options(request) -> dict:
    return request.param.kwargs


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(layers or (nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))
    )


def build(way: str, model: nn.Module, params=None, **options) -> seng.SENG:
    params = list(model.parameters()) if params is None else params
    options = copy.deepcopy(options)  # schedulers write into a tensor lr
    if way == "module":
        return INFO.optim_cls(params, module=model, **options)
    with pytest.warns(UserWarning, match="no module was given") as caught:
        opt = INFO.optim_cls(params, **options)
    assert len(caught) == 1
    return opt


def closure_of(
    model: nn.Module, opt: torch.optim.Optimizer
) -> Callable[[], Tensor]:
    x = torch.randn(
        8, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )

    def closure():
        opt.zero_grad()
        loss = (
            (model(x.to(next(model.parameters()).dtype)) - 3).square().mean()
        )
        loss.backward()
        return loss.detach()

    return closure


def train(
    model: nn.Module, opt: torch.optim.Optimizer, steps: int, schedulers=()
) -> bool:
    """Whether the loss went the right way."""
    closure = closure_of(model, opt)
    first = closure()
    for _ in range(steps):
        loss = closure()
        assert opt.step() is None
        for scheduler in schedulers:
            scheduler.step(
                *((loss,) if isinstance(scheduler, ReduceLROnPlateau) else ())
            )
    return bool(closure() > first) == opt.param_groups[0].get(
        "maximize", False
    )


def trained(
    way: str, steps: int = 3, **options
) -> tuple[nn.Module, seng.SENG]:
    model = network()
    opt = build(way, model, **options)
    train(model, opt, steps)
    return model, opt


def test_with_a_module_the_curvature_acts():
    (model, opt), (other, plain) = trained("module"), trained("no-module")
    assert len(inspect(opt).states) == 2 and plain.engine is None
    assert not torch.allclose(model[0].weight, other[0].weight)


def assert_equal(model: nn.Module, other: nn.Module, **tolerance) -> None:
    torch.testing.assert_close(
        list(model.parameters()), list(other.parameters()), **tolerance
    )


def assert_same_state(state, other) -> None:
    """To the bit; names of parameters are optional."""
    torch.testing.assert_close(state["state"], other["state"], rtol=0, atol=0)
    for group, another in zip(
        state["param_groups"], other["param_groups"], strict=True
    ):
        assert {**group, "param_names": 0} == {**another, "param_names": 0}


@pytest.mark.parametrize(
    "name", [name for names in NOT_HERE.values() for name in names]
)
def test_cases_that_do_not_apply(name):
    pytest.skip(
        next(reason for reason, names in NOT_HERE.items() if name in names)
    )


def test_optim_infos_do_not_specify_global_cliquey_kwargs():
    assert not any(
        {"foreach", "fused", "differentiable"} & case.kwargs.keys()
        for case in INPUTS
    )


@pytest.mark.parametrize(
    "flag", ["foreach", "fused", "differentiable", "capturable"]
)
def test_other_implementations_are_refused(flag):
    with pytest.raises(
        TypeError, match=f"unexpected keyword argument '{flag}'"
    ):
        INFO.optim_cls(network(), **{flag: True})


def tensors_in(given) -> list[Tensor]:
    """The parameters in anything that an optimizer may be given, well formed or not."""
    if isinstance(given, Tensor):
        return [given]
    parts = (
        given.values()
        if isinstance(given, dict)
        else given
        if isinstance(given, (list, tuple))
        else ()
    )
    return list(dict.fromkeys(p for part in parts for p in tensors_in(part)))


@pytest.mark.parametrize(
    "error", ERRORS, ids=lambda error: error.optimizer_error_input.desc
)
def test_errors(way, error):
    given = error.optimizer_error_input
    model = network(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for layer, p in zip(model, tensors_in(given.params), strict=False):
        layer.weight = p
    told = (
        pytest.warns
        if issubclass(error.error_type, Warning)
        else pytest.raises
    )
    with told(error.error_type, match=error.error_regex):
        INFO.optim_cls(
            given.params,
            **given.kwargs,
            **({"module": model} if way == "module" else {}),
        )


def test_no_parameters_are_an_error(way):
    with pytest.raises(
        ValueError, match="optimizer got an empty parameter list"
    ):
        INFO.optim_cls(
            [], **({"module": network()} if way == "module" else {})
        )


@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize(
    "schedulers",
    [[], *INFO.scheduler_inputs],
    ids=["none", *range(len(INFO.scheduler_inputs))],
)
def test_forloop_goes_right_direction(way, options, contiguous, schedulers):
    model = network()
    for p in model.parameters() if not contiguous else ():
        p.data = p.data.unsqueeze(-1).repeat_interleave(2, -1)[..., 0]
        assert not p.is_contiguous()
    opt = build(way, model, **options)
    assert train(model, opt, 20, [make(opt) for make in schedulers])


def test_second_order_optims_return_consistent_types(way, options):
    """A closure's loss comes back from every step, and the steps are those without a closure."""
    usual, _ = trained(way, 5, **options)
    model, opt = trained(way, 0, **options)
    closure = closure_of(model, opt)
    assert {type(opt.step(closure)) for _ in range(5)} == {Tensor}
    assert_equal(usual, model, rtol=0, atol=0)


@with_schedulers
def test_param_group_with_lrscheduler_goes_right_direction(way, schedulers):
    model = network()
    opt = build(
        way,
        model,
        [
            {"params": model[0].parameters()},
            {"params": model[2].parameters(), "lr": 0.01},
        ],
    )
    assert train(model, opt, 20, [make(opt) for make in schedulers])


@pytest.mark.parametrize("dimensions", [0, 1, 2])
def test_tensor_lr(way, options, dimensions):
    number, _ = trained(way, **options | {"lr": 0.01})
    tensor, _ = trained(
        way, **options | {"lr": torch.tensor(0.01).reshape([1] * dimensions)}
    )
    assert_equal(number, tensor)


def test_rosenbrock_sparse(way):
    """torch's SGD takes sparse gradients; SENG says that it does not."""
    model = network(nn.Linear(3, 2), nn.Embedding(4, 3, sparse=True))
    with pytest.warns(
        UserWarning,
        match="embeddings with sparse gradients"
        if way == "module"
        else "no module",
    ):
        opt = INFO.optim_cls(
            model.parameters(),
            **({"module": model} if way == "module" else {}),
        )
    model[0](model[1](torch.tensor([0, 2]))).sum().backward()
    with pytest.raises(
        RuntimeError, match="SENG does not support sparse gradients"
    ):
        opt.step()


def test_complex(options):
    """Without a module: as pairs of real numbers."""
    if options.get("recipe") == "muon":
        pytest.skip("a matrix of pairs is another matrix: see the next test")
    params = [
        torch.randn(4, 5, dtype=torch.complex128),
        torch.randn(4, dtype=torch.complex128),
        torch.randn(4, 5),
    ]
    reals = [
        torch.view_as_real(p).clone() if p.is_complex() else p.clone()
        for p in params
    ]
    optimizers = [
        INFO.optim_cls(ps, **copy.deepcopy(options)) for ps in (params, reals)
    ]
    for _ in range(3):
        for p, r in zip(params, reals, strict=True):
            r.grad = torch.randn_like(r)
            p.grad = (
                torch.view_as_complex(r.grad) if p.is_complex() else r.grad
            )
        for opt in optimizers:
            opt.step()
    torch.testing.assert_close(
        [torch.view_as_real(p) if p.is_complex() else p for p in params], reals
    )


def test_complex_matrices_take_the_step_of_adamw_beside_muons():
    p = torch.randn(4, 5, dtype=torch.complex128)
    q = p.clone()
    opt = INFO.optim_cls([p], recipe="muon", lr=0.1, weight_decay=0.3)
    adamw = torch.optim.AdamW(
        [q], lr=0.1 * ADAM_SHARE, betas=(0.9, 0.95), weight_decay=0.3
    )
    for _ in range(3):
        p.grad = torch.randn_like(p)
        q.grad = p.grad.clone()
        opt.step()
        adamw.step()
    torch.testing.assert_close(p, q, rtol=0, atol=0)


def test_complex_2d():
    """With a module: a complex layer takes the plain gradient, and that is said."""
    model = network(nn.Linear(3, 2, dtype=torch.complex128), nn.Linear(2, 2))
    with pytest.warns(
        UserWarning,
        match="0.weight, 0.bias .complex parameters are not supported",
    ):
        opt = build("module", model, lr=0.1, momentum=0.0)
    model[1](
        model[0](torch.randn(4, 3, dtype=torch.complex128)).abs()
    ).square().sum(1).mean().backward()
    want = model[0].weight.detach() - 0.1 * model[0].weight.grad
    opt.step()
    torch.testing.assert_close(model[0].weight.detach(), want)


def with_sgd(way: str, make: Callable[[], nn.Module], options: dict):
    """Two models: SENG's at λ = ∞, and that of torch's SGD by its plain loop."""
    ours, theirs = make(), make()
    same = {
        k: v
        for k, v in options.items()
        if k in ("lr", "momentum", "nesterov", "weight_decay", "maximize")
    }
    rest = {k: v for k, v in options.items() if k != "recipe"}
    of_identity = replace(
        options.get("curvature", seng.Curvature()), base=None
    )
    rest |= {"damping": float("inf"), "curvature": of_identity}
    if options.get("recipe") == "muon":
        pytest.skip("another recipe's limit is not SGD")
    sgd = torch.optim.SGD(
        theirs.parameters(),
        foreach=False,
        **({"lr": 0.1, "momentum": 0.9} | copy.deepcopy(same)),
    )
    return (ours, build(way, ours, **rest)), (theirs, sgd)


@pytest.mark.filterwarnings(
    "ignore:seng. these parameters take the plain gradient. scalar"
)
def test_foreach_matches_forloop(way, options):
    """Through a step without gradients and two with a frozen layer; with a parameter of no dimension."""

    def make():
        model = network()
        model.register_parameter("scalar", nn.Parameter(torch.tensor(1.0)))
        return model

    pairs = with_sgd(way, make, options)
    for model, opt in pairs:
        for i in range(7):
            model[2].requires_grad_(i not in (3, 4))
            opt.zero_grad() if i == 2 else closure_of(model, opt)()
            model.scalar.grad = torch.tensor(0.5)
            opt.step()
    assert_equal(pairs[0][0], pairs[1][0])


class Mixed(nn.Sequential):
    def forward(self, x):
        for layer in self:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


def test_mixed_device_dtype(way, options):
    """The dtypes; the devices need GPUs."""
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    pairs = with_sgd(
        way,
        lambda: Mixed(
            *network(*(nn.Linear(5, 5, dtype=dtype) for dtype in dtypes))
        ),
        options,
    )
    for model, opt in pairs:
        for _ in range(3):
            opt.step(closure_of(model, opt))
    assert_equal(pairs[0][0], pairs[1][0])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16], ids=str
)
def test_set_default_dtype_works_with_foreach(way, options, dtype):
    usual, _ = trained(way, 5, **options)
    model, opt = trained(way, 0, **options)
    torch.set_default_dtype(dtype)
    train(model, opt, 5)
    assert_equal(usual, model, rtol=0, atol=0)


def test_a_step_makes_nothing_on_the_default_device(way, options):
    usual, _ = trained(way, 5, **options)
    model, opt = trained(way, 0, **options)
    closure = closure_of(model, opt)
    with torch.device("meta"):
        for _ in range(5):
            opt.step(closure)
    assert_equal(usual, model, rtol=0, atol=0)


def test_param_groups_weight_decay(way, options):
    model = network()
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "weight_decay": 0.0},
    ]
    assert train(model, build(way, model, groups, **options), 20)


def test_param_groups_lr(way, options):
    model = network()
    still = copy.deepcopy(model[2])
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": model[2].parameters()},
    ]
    assert train(
        model, build(way, model, groups, **options | {"lr": 1e-28}), 20
    )
    assert_equal(model[2], still, rtol=0, atol=0)


def test_add_param_group(way, options):
    usual, _ = trained(way, 5, **options)
    model = network()
    opt = build(way, model, model[0].parameters(), **options)
    opt.add_param_group({"params": model[2].parameters()})
    train(model, opt, 5)
    assert_equal(usual, model, rtol=0, atol=0)


def test_step_is_noop_when_params_have_no_grad(way, options):
    model = network()
    build(way, model, **options).step(lambda: torch.tensor([1.0]))
    assert_equal(model, network(), rtol=0, atol=0)


def test_step_is_noop_for_zero_grads(way, options):
    model = network()
    opt = build(way, model, **options | {"weight_decay": 0.0})
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step(lambda: torch.tensor([1.0]))
    assert_equal(model, network(), rtol=0, atol=0)


def test_grads_are_never_inplaced_into(way, options):
    model, opt = trained(way, 0, **options)
    for _ in range(5):
        closure_of(model, opt)()
        before = [(p.grad, p.grad._version) for p in model.parameters()]
        opt.step()
        assert all(
            p.grad is grad and grad._version == n
            for p, (grad, n) in zip(model.parameters(), before, strict=True)
        )


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad(way, to_none):
    model, opt = trained(way)
    opt.zero_grad(set_to_none=to_none)
    assert all(
        p.grad is None if to_none else not p.grad.any()
        for p in model.parameters()
    )


def test_optimizer_can_be_printed(way, options):
    assert "damping: " in repr(build(way, network(), **options))


def test_non_empty_state(way, options):
    assert all(trained(way, 1, **options)[1].state.values())


def params_of(model: nn.Module, named: bool) -> list:
    return list(model.named_parameters() if named else model.parameters())


@named_or_not
def test_state_dict_deterministic(way, options, named):
    model = network()
    opt = build(way, model, params_of(model, named[0]), **options)
    train(model, opt, 10)
    other = copy.deepcopy(model)
    resumed = build(way, other, params_of(other, named[1]), **options)
    state = copy.deepcopy(opt.state_dict())
    resumed.load_state_dict(state)
    assert_same_state(state, opt.state_dict())  # loading leaves it as it was
    train(model, opt, 10)
    train(other, resumed, 10)
    assert_equal(model, other, rtol=0, atol=0)
    assert_same_state(opt.state_dict(), resumed.state_dict())


@named_or_not
def test_can_load_from_to_named_state_dict(way, options, named):
    model = network()
    opt = build(way, model, params_of(model, named[0]), **options)
    train(model, opt, 3)
    other = build(way, model, params_of(model, named[1]), **options)
    other.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, other, 1)
    names = (
        [name for name, _ in model.named_parameters()] if any(named) else None
    )
    assert other.state_dict()["param_groups"][0].get("param_names") == names


def test_can_load_older_state_dict(way, options):
    model, opt = trained(way, **options)
    older = copy.deepcopy(opt.state_dict())
    for flag in INFO.not_og_supported_flags:
        del older["param_groups"][0][flag]
    opt.load_state_dict(older)
    assert all(
        opt.param_groups[0][flag] == opt.defaults[flag]
        for flag in INFO.not_og_supported_flags
    )
    train(model, opt, 1)


@pytest.mark.parametrize("weights_only", [False, True])
def test_save_load_equality_with_weights_only(way, options, weights_only):
    _, opt = trained(way, **options)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    assert_same_state(
        torch.load(file, weights_only=weights_only), opt.state_dict()
    )


def test_load_nontensor_step(way, options):
    def plain(key, value):
        if isinstance(value, dict):
            return {k: plain(k, v) for k, v in value.items()}
        return (
            value.item()
            if str(key).split(".")[-1] in ("step", "seed")
            else value
        )

    model, opt = trained(way, **options)
    state = opt.state_dict()
    opt.load_state_dict({**state, "state": plain("state", state["state"])})
    other, its_opt = trained(way, **options)
    train(model, opt, 1)
    train(other, its_opt, 1)
    assert_equal(model, other, rtol=0, atol=0)
    assert_same_state(opt.state_dict(), its_opt.state_dict())


def test_load_state_dict_across_dtypes(way, options):
    """float64 into float32, the momentum and the curvature."""
    double, opt = trained(way, **options)
    single = copy.deepcopy(double).float()
    other = build(way, single, **options)
    other.load_state_dict(opt.state_dict())
    own = copy.deepcopy(single)
    never_double = build(way, own, **options)
    train(own, never_double, 1)
    assert dtypes(other) <= dtypes(never_double) | {torch.float32}
    train(double, opt, 3)
    train(single, other, 3)
    # Muon's step is worked out in bfloat16.
    atol = 1e-3 if options.get("recipe") == "muon" else 1e-4
    assert_equal(double, single, rtol=1e-3, atol=atol, check_dtype=False)


def dtypes(opt: seng.SENG) -> set[torch.dtype]:
    leaves = tree_leaves(opt.state_dict()["state"])
    return {leaf.dtype for leaf in leaves if leaf.is_floating_point()}


@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))],
    ids=["deepcopy", "pickle"],
)
def test_deepcopy_copies_all_public_attrs(way, options, how):
    model, opt = trained(way, **options)
    other, copied = how((model, opt))
    assert {name for name in vars(opt) if name[0] != "_"} == {
        name for name in vars(copied) if name[0] != "_"
    }
    assert_same_state(opt.state_dict(), copied.state_dict())
    train(model, opt, 3)
    train(other, copied, 3)
    assert_equal(model, other, rtol=0, atol=0)


def mark(opt):
    opt.state["mark"] = 1


def unmark(opt, state):
    return {**state, "marked": state["state"].pop("mark", 0)}


def test_state_dict_pre_hook(way):
    """What a hook adds to the state is saved and loaded as it is."""
    model, opt = trained(way)
    opt.register_state_dict_pre_hook(mark)
    other = build(way, model)
    other.load_state_dict(opt.state_dict())
    assert other.state["mark"] == 1


@pytest.mark.parametrize("marked", [0, 1], ids=["post", "pre-post"])
def test_state_dict_post_hook(way, marked):
    """And state_dict_pre_post_hook."""
    _, opt = trained(way)
    if marked:
        opt.register_state_dict_pre_hook(mark)
    opt.register_state_dict_post_hook(unmark)
    state = opt.state_dict()
    assert state["marked"] == marked and "mark" not in state["state"]


def test_state_dict_hooks_see_the_whole_state(way):
    """What a post-hook returns is what is saved, and what a pre-hook returns is what is loaded, the curvature with it."""
    model, opt = trained(way)
    want = opt.state_dict()
    opt.register_state_dict_post_hook(lambda opt, state: {"wrapped": state})
    other, blocks = build(way, model), []
    other.register_load_state_dict_pre_hook(
        lambda opt, state: state["wrapped"]
    )
    other.register_load_state_dict_post_hook(
        lambda opt: blocks.append(
            len(inspect(opt).states) if opt.engine else 0
        )
    )
    saved = opt.state_dict()
    assert_same_state(saved["wrapped"], want)
    other.load_state_dict(saved)
    assert_same_state(other.state_dict(), want)
    assert blocks == [2 if way == "module" else 0]


def test_a_load_hook_can_put_the_parameters_in_another_order(way):
    model = network(
        nn.Linear(5, 5, bias=False), nn.Tanh(), nn.Linear(5, 5, bias=False)
    )
    opt = build(way, model, params_of(model, named=True))
    train(model, opt, 2)
    other = build(way, model, params_of(model, named=True)[::-1])

    def by_name(opt, state):
        (group,), names = (
            state["param_groups"],
            opt.param_groups[0]["param_names"],
        )
        saved = dict(zip(group["param_names"], group["params"], strict=True))
        entries = {
            i: state["state"][saved[name]] for i, name in enumerate(names)
        }
        return {
            "state": entries,
            "param_groups": [{**group, "param_names": names}],
        }

    other.register_load_state_dict_pre_hook(by_name)
    other.load_state_dict(opt.state_dict())
    mine, theirs = opt.state_dict()["state"], other.state_dict()["state"]
    torch.testing.assert_close(
        [mine[0], mine[1]], [theirs[1], theirs[0]], rtol=0, atol=0
    )


def test_load_state_dict_pre_hook_and_prepend(way):
    """And load_state_dict_post_hook, load_state_dict_pre_post_hook."""

    def written(opt, state):
        state["param_groups"][0]["lr"] = 0.002

    def returned(opt, state):
        return {
            **state,
            "param_groups": [
                {**group, "lr": 0.003} for group in state["param_groups"]
            ],
        }

    _, opt = trained(way)
    seen = []
    opt.register_load_state_dict_post_hook(
        lambda opt: seen.append(opt.param_groups[0]["lr"])
    )
    opt.load_state_dict(opt.state_dict())
    opt.register_load_state_dict_pre_hook(written)
    opt.load_state_dict(opt.state_dict())
    handle = opt.register_load_state_dict_pre_hook(returned, prepend=True)
    opt.load_state_dict(opt.state_dict())
    handle.remove()
    opt.register_load_state_dict_pre_hook(returned)
    opt.load_state_dict(opt.state_dict())
    assert seen == [0.1, 0.002, 0.002, 0.003]


def test_step_all_hooks(way):
    """And step_pre_hook, step_post_hook."""
    model, said = network(), []
    opt, other = build(way, model), torch.optim.SGD(model.parameters())

    def saying(word):
        return lambda opt, args, kwargs: said.append(word)

    handles = [
        register_optimizer_step_pre_hook(saying("all before")),
        register_optimizer_step_post_hook(saying("all after")),
    ]
    for each in (opt, other):
        handles += [
            each.register_step_pre_hook(saying("before")),
            each.register_step_post_hook(saying("after")),
        ]
    for each in (opt, other, opt):
        each.step(closure_of(model, each))
    for handle in handles:
        handle.remove()
    opt.step(closure_of(model, opt))
    assert said == ["all before", "before", "after", "all after"] * 3
