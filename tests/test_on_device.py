"""What may differ on an accelerator: precision, compiled and recomputed blocks, sharding, hooks, and resuming.

``STEPSNET_TEST_DEVICE=cuda`` runs it there, as benchmarks/gpu.sh does. On a CPU, where other tests cover most of it,
one family stands for all.
"""

import copy
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import detection_tasks
import pytest
import segmentation_tasks
import timm
import torch
import torch.distributed as dist
from coco_images import write_coco
from model_families import TINY, image_of, tiny
from segmentation_images import write_camvid
from small_detectors import build, images_of, targets_of
from torch.distributed.fsdp import fully_shard

import stepsnet
from stepsnet.analysis.residual_stream import measure_stream
from stepsnet.device import autocast
from stepsnet.errors import UserError
from stepsnet.models.blocks import blocks_of, recompute_blocks
from stepsnet.models.build import build_model
from stepsnet.models.compilation import compile_blocks, running_eagerly
from stepsnet.models.compress import compress
from stepsnet.models.cuda_graph import GraphedTraining
from stepsnet.models.optimize import optimize
from stepsnet.output.console import Lines
from stepsnet.recipes import find_recipe
from stepsnet.residual import DESIGNS, connect
from stepsnet.run_folder.checkpoint import load_weights
from stepsnet.runs.train import train_run
from stepsnet.settings.config import ModelSpec
from stepsnet.settings.overrides import override

DEVICE = torch.device(os.environ.get("STEPSNET_TEST_DEVICE", "cpu"))
ON_CPU = DEVICE.type == "cpu"
LANGUAGE = {"widths": [32, 48, 64], "depths": [2, 1, 1], "num_attention_heads": [1, 2, 2], "vocab_size": 96}
FAMILIES = ["deit"] if ON_CPU else [*TINY, "language"]
HALF = [] if ON_CPU else [["amp_dtype=float16", "ema_decay=0.9"]]  # with a scaler, which is for CUDA
GRAPHS = [] if ON_CPU else [["cuda_graph=true", "ema_decay=0.9", "amp_dtype=float16", "stream_interval=2"]]
OTHER_TASKS = ("detection", "segmentation", "language")
EVERY = pytest.mark.parametrize("family", FAMILIES)
IMAGES = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def make(family, **changes):
    if family != "language":
        return tiny(family)
    torch.manual_seed(0)
    model = build_model(ModelSpec("steps_transformer", {**LANGUAGE, **changes}))
    model.config.use_cache = False  # as in training; a cache is not captured
    return model


def sample(family):
    if family == "language":
        return torch.randint(LANGUAGE["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(1))
    return image_of(family)


def small_vit(design="plain"):
    """With every weight a little off its start, so that no gain is 0 or 1."""
    torch.manual_seed(0)
    shape = dict(img_size=32, patch_size=8, num_classes=5, embed_dim=64, depth=6, num_heads=8)
    model = timm.create_model("vit_tiny_patch16_224", **shape)
    model.blocks = connect(model.blocks, design)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def outputs_and_gradients(model, x, amp_dtype="float32"):
    """Of a loss that is linear in the logits, so that gradients are compared and not a softmax."""
    model.zero_grad()
    device = next(model.parameters()).device
    with autocast(amp_dtype, device):
        found = model(x.to(device))
    logits = getattr(found, "logits", found).float()
    weights = torch.linspace(-1, 1, logits.numel(), device=device).view(logits.shape)
    (logits * weights).mean().backward()
    return logits.detach().cpu(), {name: p.grad.detach().float().cpu() for name, p in model.named_parameters()}


def error(got, expected):
    """The norm of the difference over the norm."""
    return ((got - expected).norm() / expected.norm()).item()


def worst(got, expected):
    """The largest error among gradients that are not negligible."""
    largest = max(gradient.norm() for gradient in expected.values())
    return max(error(got[name], each) for name, each in expected.items() if each.norm() > 1e-4 * largest)


@pytest.fixture(autouse=True)
def exact_products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def assert_same_there(model, x, logits, gradients):
    """On a CPU there is nothing to compare."""
    if not ON_CPU:
        there, their_gradients = outputs_and_gradients(model.to(DEVICE), x)
        assert error(there, logits) < 1e-4 and worst(their_gradients, gradients) < 1e-3


@EVERY
def test_outputs_and_gradients_are_those_of_the_cpu(family):
    model, x = make(family).eval(), sample(family)
    logits, gradients = outputs_and_gradients(model, x)
    assert_same_there(model, x, logits, gradients)
    half, half_gradients = outputs_and_gradients(model, x, "bfloat16")
    assert error(half, logits) < 0.1 and all(gradient.isfinite().all() for gradient in half_gradients.values())


@pytest.mark.parametrize("design", ["mhc"] if ON_CPU else DESIGNS)
def test_designs_of_the_stream_are_those_of_the_cpu(design):
    model = small_vit(design)
    logits, gradients = outputs_and_gradients(model, IMAGES)
    assert_same_there(model, IMAGES, logits, gradients)
    half, half_gradients = outputs_and_gradients(model, IMAGES, "bfloat16")
    assert error(half, logits) < 0.1 and all(gradient.isfinite().all() for gradient in half_gradients.values())
    if not ON_CPU and design in ("mhc", "dense_former", "attention_residuals"):  # kinds of streams; half a minute each
        compile_blocks(model)
        compiled, their_gradients = outputs_and_gradients(model, IMAGES)
        assert error(compiled, logits) < 1e-4 and worst(their_gradients, gradients) < 1e-3


@pytest.mark.skipif(ON_CPU, reason="test_compress.py is about a CPU")
def test_a_model_is_compressed_alike():
    model = small_vit()
    expected = compress(model, IMAGES, 2).model.eval()(IMAGES)
    there = compress(model.to(DEVICE), IMAGES.to(DEVICE), 2)
    assert error(there.model.eval()(IMAGES.to(DEVICE)).detach().cpu(), expected) < 1e-2
    assert there.stream_loss(IMAGES.to(DEVICE)).isfinite()


@pytest.mark.skipif(ON_CPU, reason="compiled blocks on a CPU are in test_engine_blocks.py and test_models_training.py")
@EVERY
def test_compiled_blocks_give_the_same(family):
    model, x = make(family).to(DEVICE).eval(), sample(family)
    expected = outputs_and_gradients(model, x)
    compile_blocks(model)
    logits, gradients = outputs_and_gradients(model, x)
    assert error(logits, expected[0]) < 1e-4 and worst(gradients, expected[1]) < 1e-3


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
@pytest.mark.parametrize("amp_dtype", ["float32", "bfloat16"])
@EVERY
def test_graphs_in_training_give_the_same(family, amp_dtype):
    """Outputs, gradients and statistics, of what is drawn too; of other inputs and weights than at the capture."""
    model = make(family) if family == "language" else tiny(family, drop_path_rate=0.3)
    model = model.to(DEVICE).train()
    graphed = copy.deepcopy(model)
    graphed.forward = GraphedTraining(graphed)
    inputs = [sample(family), sample(family).flip(0), sample(family)]
    for number, x in enumerate(inputs):
        found = []
        for each in (model, graphed):
            torch.manual_seed(number)
            found.append(outputs_and_gradients(each, x, amp_dtype))
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(1.01)
        assert error(found[1][0], found[0][0]) < 1e-5 and worst(found[1][1], found[0][1]) < 1e-4
    assert len(graphed.forward.captured) == 1
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(graphed.get_buffer(name), buffer)


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
@pytest.mark.parametrize("design", DESIGNS)
def test_designs_of_the_stream_are_the_same_in_graphs(design):
    model = small_vit(design).to(DEVICE).train()
    graphed = copy.deepcopy(model)
    graphed.forward = GraphedTraining(graphed)
    for x in (IMAGES, IMAGES.flip(0)):
        expected, found = (outputs_and_gradients(each, x, "bfloat16") for each in (model, graphed))
        assert error(found[0], expected[0]) < 1e-3 and worst(found[1], expected[1]) < 1e-2


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
@pytest.mark.parametrize("design", ["plain", "value_residual", "dense_former", "attention_residuals_block", "mhc"])
def test_compiled_language_models_are_the_same_in_graphs(design):
    """As the depth bench trains them."""
    shape = {"widths": [48], "depths": [4], "num_attention_heads": [2]}
    model = make("language", residual=design, **shape).to(DEVICE).train()
    graphed = copy.deepcopy(model)
    optimize(graphed, "training")
    graphed.forward = GraphedTraining(graphed, graphed.__dict__.get("forward"))
    for x in (sample("language"), sample("language").flip(0)):
        expected, found = (outputs_and_gradients(each, x) for each in (model, graphed))
        assert error(found[0], expected[0]) < 1e-4 and worst(found[1], expected[1]) < 1e-3


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
@pytest.mark.parametrize(
    "settings",
    [
        ["clip_grad=0.05", "accumulation_steps=2"],
        ["amp_dtype=bfloat16", "model.args.drop_path_rate=0.2", "ema_decay=0.9"],
        ["amp_dtype=float16", "clip_grad=0.05"],
        ["compile=true"],
    ],
)
def test_a_run_in_graphs_has_the_same_weights(settings, tmp_path):
    recipe = override(find_recipe("digits/tiny"), ["epochs=1", f"device={DEVICE}", *settings])
    for name, graph in (("without", False), ("with", True)):
        with Lines() as display:
            train_run(override(recipe, [f"cuda_graph={str(graph).lower()}"]), tmp_path / name, display)
    expected, found = (load_weights(tmp_path / name / "model.safetensors") for name in ("without", "with"))
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
def test_graphs_add_up_gradients_and_follow_the_mode():
    model, x = make("deit").to(DEVICE).train(), sample("deit").to(DEVICE)
    graphed = copy.deepcopy(model)
    graphed.forward = GraphedTraining(graphed)
    for each in (model, graphed):
        for batch in (x, x.flip(0), x):  # accumulated, as in a large batch's parts
            each(batch).square().mean().backward()
    gradients = [{name: p.grad.cpu() for name, p in each.named_parameters()} for each in (model, graphed)]
    assert worst(*reversed(gradients)) < 1e-4
    model.eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graphed.eval()(x), model(x))
    assert len(graphed.forward.captured) == 2
    graphed.train()
    seen = []
    graphed.blocks.register_forward_hook(lambda *_: seen.append(1))
    with running_eagerly(graphed):
        graphed(x)
    assert seen == [1]
    graphed.double().eval()
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(graphed(x.double()), model.double()(x.double()))
    assert len(graphed.forward.captured) == 1  # the weights had moved


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
def test_what_cannot_be_captured_is_named():
    class Asks(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() < 0 else -super().forward(x)

    model = Asks(4, 4).to(DEVICE).train()
    model.forward = GraphedTraining(model)
    x = torch.ones(2, 4, device=DEVICE)
    with pytest.raises(UserError, match="cuda_graph: Asks cannot be captured: called a synchronizing CUDA operation"):
        model(x)
    model.eval()
    with torch.no_grad():
        found = [model(x) for _ in range(4)]
    assert len(model.forward.captured) == 1 and all(torch.equal(one, found[0]) for one in found)
    stream = torch.cuda.current_stream()
    other = make("deit").to(DEVICE).train()  # nothing of CUDA's is left in between
    other.forward = GraphedTraining(other)
    outputs_and_gradients(other, sample("deit"))
    assert torch.rand(1, device=DEVICE).isfinite() and torch.cuda.current_stream() == stream


@pytest.mark.skipif(ON_CPU, reason="CUDA has graphs")
def test_what_is_drawn_on_the_processor_is_named():
    class Draws(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * torch.rand(()).to(x.device, non_blocking=True)

    model = Draws(4, 4).to(DEVICE).train()
    model.forward = GraphedTraining(model)
    with pytest.raises(UserError, match="Draws cannot be captured: it draws random numbers on the processor"):
        model(torch.ones(2, 4, device=DEVICE))


@EVERY
def test_recomputed_blocks_give_the_same(family):
    model, x = make(family).to(DEVICE).eval(), sample(family)
    expected = outputs_and_gradients(model, x)
    recompute_blocks(blocks_of(model))
    logits, gradients = outputs_and_gradients(model, x)
    assert torch.equal(logits, expected[0]) and worst(gradients, expected[1]) < 1e-5


@pytest.mark.skipif(ON_CPU, reason="FSDP on a CPU is in test_distributed.py")
@EVERY
def test_sharded_over_one_rank_it_is_the_same(family, tmp_path):
    model, x = make(family).to(DEVICE).eval(), sample(family)
    expected = outputs_and_gradients(model, x)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh(DEVICE.type, (1,))
        for block in blocks_of(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model.zero_grad()
        found = model(x.to(DEVICE))
        logits = getattr(found, "logits", found)
        (logits * torch.linspace(-1, 1, logits.numel(), device=DEVICE).view(logits.shape)).mean().backward()
        gradients = {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
    finally:
        dist.destroy_process_group()
    assert error(logits.detach().cpu(), expected[0]) < 1e-5 and worst(gradients, expected[1]) < 1e-4


@pytest.mark.skipif(ON_CPU, reason="test_residual_stream.py is about a CPU")
@EVERY
def test_the_residual_stream_is_measured_alike(family):
    model, x = make(family).eval(), sample(family)

    def loss_of(model):
        found = model(x.to(next(model.parameters()).device))
        return getattr(found, "logits", found).float().square().mean()

    expected = measure_stream(model, loss_of)
    for ours, theirs in zip(measure_stream(model.to(DEVICE), loss_of), expected, strict=True):
        assert ours.width == theirs.width
        for key in ("gamma_read", "branch", "gradient"):
            assert getattr(ours, key) == pytest.approx(getattr(theirs, key), rel=1e-2), key


@pytest.mark.parametrize("name", ["mask_rcnn"] if ON_CPU else ["mask_rcnn", "cascade_mask_rcnn"])
def test_detectors_learn_and_detect(name):
    model = build(name).to(DEVICE)
    images = [image.to(DEVICE) for image in images_of((64, 80), (96, 64))]
    targets = [{key: value.to(DEVICE) for key, value in t.items()} for t in targets_of((64, 80), (96, 64))]
    with autocast("bfloat16", DEVICE):
        losses = model.train()(images, targets)
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    with torch.no_grad():
        found = model.eval()(images)
    assert len(found) == 2 and all(one["masks"].device.type == DEVICE.type for one in found)


def test_a_segmenter_learns():
    model = build_model(ModelSpec("upernet", {"backbone": "test_steps_swin", "num_classes": 3, "channels": 16}))
    with autocast("bfloat16", DEVICE):
        outputs = model.to(DEVICE).train()(torch.rand(2, 3, 64, 64, device=DEVICE))
    sum(logits.float().square().mean() for logits in outputs).backward()
    assert all(logits.shape == (2, 3, 64, 64) and logits.isfinite().all() for logits in outputs)


def recipe_of(task, folder):
    """A few updates of a small model on data of a test's own, and its evaluation."""
    if task == "detection":
        return detection_tasks.tiny(write_coco(folder), "epochs=1")
    if task == "segmentation":
        return segmentation_tasks.tiny_recipe(write_camvid(folder), "epoch_updates=2")
    if task == "language":
        small = ["widths=[16,32]", "depths=[1,1]", "num_attention_heads=[2,2]", "vocab_size=280"]
        data = ["vocab_size=280", "seq_len=16", "batch_size=4", "epoch_updates=3"]
        return override(find_recipe("python-docs/tiny"), [*(f"model.args.{each}" for each in small), *data, "epochs=1"])
    return override(find_recipe("digits/tiny"), ["epochs=1", "model.args.drop_path_rate=0.1"])


@pytest.mark.parametrize("settings", [["amp_dtype=bfloat16"], *HALF, *GRAPHS])
@pytest.mark.parametrize("task", ["classification"] if ON_CPU else ["classification", *OTHER_TASKS])
def test_each_task_trains_and_is_scored(task, settings, tmp_path, monkeypatch):
    monkeypatch.setenv("STEPSNET_CACHE", str(tmp_path / "cache"))
    if task == "detection" and settings in GRAPHS:
        pytest.skip("a detector's losses ask for numbers on the way")
    recipe = override(recipe_of(task, tmp_path / "data"), [f"device={DEVICE}", "stream_epochs=1", *settings])
    with Lines() as display:
        summary = train_run(recipe, tmp_path / "run", display)
    assert summary["metrics"] and all(value == value for value in summary["metrics"].values())
    assert all(weight.isfinite().all() for weight in load_weights(tmp_path / "run" / "model.safetensors").values())


@pytest.mark.skipif(ON_CPU, reason="resuming on a CPU is in test_engine.py and test_killed.py")
@pytest.mark.parametrize(
    "settings", [[], ["amp_dtype=bfloat16", "compile=true"], ["cuda_graph=true"], ["grad_checkpointing=0.5"]]
)
def test_a_resumed_run_is_the_same_to_the_bit(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    recipe = override(find_recipe("digits/tiny"), ["epochs=3", f"device={DEVICE}", "keep_checkpoints=3", *settings])
    try:
        with Lines() as display:
            train_run(recipe, tmp_path / "whole", display)
            shutil.copytree(tmp_path / "whole", tmp_path / "cut")
            for path in ("summary.json", "model.safetensors", "report.html"):
                (tmp_path / "cut" / path).unlink()
            shutil.rmtree(max((tmp_path / "cut" / "checkpoints").iterdir()))
            train_run(recipe, tmp_path / "cut", display, resume=True)
    finally:
        torch.use_deterministic_algorithms(False)
    whole, cut = (load_weights(tmp_path / name / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.skipif(ON_CPU, reason="test_optimize.py is about a CPU")
@pytest.mark.parametrize("compile", [False, True])
@EVERY
def test_an_optimized_model_gives_the_same(family, compile):
    model, x = make(family).eval(), sample(family)
    optimized = stepsnet.optimize(copy.deepcopy(model).to(DEVICE), compile=compile)
    for _ in range(4):  # with other weights, and replayed
        with torch.no_grad():
            expected, found = model(x), optimized(x.to(DEVICE))
        assert error(getattr(found, "logits", found).cpu(), getattr(expected, "logits", expected)) < 1e-4
        model.load_state_dict({name: value * 1.01 for name, value in model.state_dict().items()})
        optimized.load_state_dict(model.state_dict())


@pytest.mark.skipif(ON_CPU, reason="test_cuda_graph.py is about threads alone; here their streams differ too")
@torch.no_grad()
def test_callers_in_several_threads_and_streams_get_their_own_answers():
    model = stepsnet.optimize(timm.create_model("test_steps_deit", img_size=32, num_classes=5).to(DEVICE))
    xs = [torch.randn(1, 3, 32, 32, device=DEVICE) for _ in range(64)]
    for _ in range(2):  # the second call of a shape is captured
        model(xs[0])
    torch.cuda.synchronize()

    @torch.no_grad()
    def answer(x):
        with torch.cuda.stream(torch.cuda.Stream()):
            y = model(x)
            torch.cuda.current_stream().synchronize()
        return y

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(answer, xs))
    for x, y in zip(xs, found, strict=True):
        torch.testing.assert_close(y, model.forward.as_built(x))


class _Scaled(torch.nn.Module):
    """A number in a buffer, as Gemma's embedding has it."""

    def __init__(self, width):
        super().__init__()
        self.fc = torch.nn.Linear(width, width)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        return x + self.scale * self.fc(x)


def test_a_model_with_a_number_in_a_buffer_can_be_put_in_steps():
    model = torch.nn.Sequential(*(_Scaled(32) for _ in range(4))).to(DEVICE)
    x = torch.randn(2, 5, 32, device=DEVICE)
    generator = torch.get_rng_state() if ON_CPU else torch.cuda.get_rng_state()
    assert stepsnet.describe_stepify(model, 2, example=x).streams
    assert torch.equal(generator, torch.get_rng_state() if ON_CPU else torch.cuda.get_rng_state())
    assert stepsnet.stepify(model, 2, example=x)(x).device == x.device


@pytest.mark.skipif(ON_CPU, reason="it asks whether a graph can be captured")
@pytest.mark.parametrize("name", ["test_steps_deit", "test_steps_swin", "test_steps_resnet"])
def test_inference_can_be_captured_in_a_graph(name):
    """No synchronisation, and no allocation that differs from call to call: a graph replays what was captured."""
    size = 56 if "swin" in name else 32
    model = timm.create_model(name, **({} if "resnet" in name else {"img_size": size})).to(DEVICE).eval()
    x = torch.randn(2, 3, size, size, device=DEVICE)
    with torch.inference_mode():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        torch.testing.assert_close(captured, model(x))
