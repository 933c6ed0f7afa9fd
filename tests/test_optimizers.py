"""Every optimizer of timm's that a run may use goes on from a checkpoint as if it had not been stopped."""

import dataclasses
from functools import partial

import pytest
import timm.optim
import torch
from line_fits import ALONE, SETTINGS
from torch import nn

from stepsnet.engine.optim import build_optimizer
from stepsnet.engine.train_state import TrainState
from stepsnet.errors import UserError
from stepsnet.run_folder.checkpoint import latest

# of second derivatives, of bitsandbytes and of apex; all others of timm's do with settings that name them alone
UNUSABLE = ("adahessian", "bnb", "fused")
USABLE = [name for name in timm.optim.list_optimizers() if not name.startswith(UNUSABLE)]


def started(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2))
    settings = dataclasses.replace(SETTINGS, opt=name, lr=3e-3)
    return TrainState(model, build_optimizer(model, settings), None, ALONE, sharded=False)


def train(state, updates):
    for update in updates:
        torch.manual_seed(update)  # as the training loop does: some optimizers draw
        inputs = torch.randn(16, 6)
        state.model(inputs).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


@pytest.mark.parametrize("name", USABLE)
def test_it_goes_on_bit_for_bit(name, tmp_path):
    whole, stopped, resumed = (started(name) for _ in range(3))
    train(whole, range(60))  # kron balances one of a hundred updates at random
    train(stopped, range(25))
    stopped.save(tmp_path, 25, {"position": {}}, keep=1)
    found, _ = latest(tmp_path)
    resumed.restore(found)
    for ours, theirs in zip(resumed.model.parameters(), stopped.model.parameters()):
        assert torch.equal(ours, theirs)
    train(resumed, range(25, 60))
    for (key, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters()):
        assert torch.equal(ours, theirs), key


class WithASpare(nn.Module):
    """A parameter that has a gradient in some updates only, or in none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net, self.spare, self.uses_it = nn.Linear(6, 2), nn.Parameter(torch.ones(2)), False

    def forward(self, x):
        return self.net(x) * self.spare if self.uses_it else self.net(x)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("name", "momentum"), [("adamw", 0.9), ("sgd", 0.9), ("momentum", 0.0)])
def test_it_goes_on_where_a_parameter_had_no_gradient_yet(name, momentum, sharded, tmp_path):
    def new():
        model = WithASpare()
        settings = dataclasses.replace(SETTINGS, opt=name, momentum=momentum, lr=3e-3)
        return TrainState(model, build_optimizer(model, settings), None, ALONE, sharded)

    whole, stopped, resumed = new(), new(), new()
    train(whole, range(6))
    train(stopped, range(6))
    stopped.save(tmp_path, 6, {"position": {}}, keep=1)
    resumed.restore(latest(tmp_path)[0])
    for part in (range(6, 12), range(12, 18)):
        for state in (whole, resumed):
            train(state, part)
            state.model.uses_it = True
        for (key, ours), theirs in zip(resumed.model.named_parameters(), whole.model.parameters()):
            assert torch.equal(ours, theirs), key


@pytest.mark.parametrize("name", USABLE)
def test_what_a_recipe_leaves_open_is_the_optimizers_own(name):
    model = nn.Linear(6, 8)
    ours = build_optimizer(model, dataclasses.replace(SETTINGS, opt=name)).defaults
    theirs = timm.optim.create_optimizer_v2(model, opt=name, lr=SETTINGS.lr, momentum=SETTINGS.momentum).defaults
    for key in ("betas", "eps"):
        assert ours.get(key) == theirs.get(key)


def test_betas_and_eps_are_given_to_the_optimizer_or_refused():
    given = dataclasses.replace(SETTINGS, opt="lion", betas=(0.8, 0.9))
    assert build_optimizer(nn.Linear(2, 2), given).defaults["betas"] == (0.8, 0.9)
    given = dataclasses.replace(SETTINGS, opt="adabelief", eps=1e-8)  # which is adamw's, but not its own
    assert build_optimizer(nn.Linear(2, 2), given).defaults["eps"] == 1e-8
    with pytest.raises(UserError, match=r"betas: got \(0.8, 0.9\), expected null: adan has 3 of them"):
        build_optimizer(nn.Linear(2, 2), dataclasses.replace(SETTINGS, opt="adan", betas=(0.8, 0.9)))


def test_adamws_own_said_out_loud_are_the_same_recipe():
    """As configs and records of earlier versions say them."""
    assert dataclasses.replace(SETTINGS, opt="adamw", betas=(0.9, 0.999), eps=1e-8) == SETTINGS
    assert dataclasses.replace(SETTINGS, opt="adamw", betas=(0.9, 0.99)) != SETTINGS


@pytest.mark.parametrize("name", ["lamb", "lambw"])
def test_lamb_leaves_clipping_to_clip_grad(name):
    """timm's LAMB would clip at 1 inside of its step, whatever ``clip_grad`` says."""

    def updated(make):
        torch.manual_seed(0)
        model = nn.Linear(6, 8)
        optimizer = make(model)
        for scale in (100.0, 0.1):  # clipping changes how much each gradient weighs in the moments
            (scale * model(torch.randn(4, 6)).square().sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach()

    settings = dataclasses.replace(SETTINGS, opt=name, clip_grad=None)
    ours = updated(lambda model: build_optimizer(model, settings))
    rest = {"opt": name, "lr": SETTINGS.lr, "weight_decay": SETTINGS.weight_decay}
    of_timm = {
        most: updated(partial(timm.optim.create_optimizer_v2, max_grad_norm=most, **rest)) for most in (None, 1.0)
    }
    assert torch.equal(ours, of_timm[None]) and not torch.equal(ours, of_timm[1.0])
