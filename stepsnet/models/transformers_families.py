"""Models of transformers with their layers in steps, one table row per family, made by :func:`stepsnet.stepify`.

``StepsLlamaConfig`` is LlamaConfig with the widths and depths of the steps, and ``StepsLlamaForCausalLM`` is
LlamaForCausalLM with other layers; likewise for each class of each family. The Auto classes know their model types,
``steps_llama`` and so on, once stepsnet is imported, so that these weights are never loaded into a plain ``llama``.
The paper's own models are in steps_transformer.py, where the steps are configured directly and the stream is split once
per step.
"""

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers
from huggingface_hub.dataclasses import strict
from torch import Tensor
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ..errors import UserError
from ..plan import check_steps
from .layer_config import InstalledCode, LayerConfig, PerLayer
from .slice_norm import SliceNorm
from .stepify.adapters import HeadRule
from .stepify.roles import get_path

__all__ = ["FAMILIES", "Family", "head_size_of", "layer_of", "steps_class", "steps_config_class"]


@dataclass(frozen=True)
class Family:
    """What differs between the families of transformers.

    Args:
        config: name of the configuration class.
        layer: name of the layer class, which is called with (config, layer_idx).
        layers: path of the list of layers in the base model.
        sizes: (config, width, heads) -> the configuration fields of a layer of that width.
        head_rule: as for BlockAdapter; rotary positions are made for one head size, which therefore stays the same.
        outputs: as for BlockAdapter; a family that has them has its last norm as ``norm`` of the base model.
    """

    config: str
    layer: str
    layers: str
    sizes: Callable[[Any, int, int | None], dict[str, Any]]
    head_rule: HeadRule
    outputs: tuple[str, ...] | None = None

    @property
    def config_class(self) -> Any:
        return getattr(transformers, self.config)

    @property
    def layer_class(self) -> Any:
        module = self.config_class.__module__.replace(".configuration_", ".modeling_")
        return getattr(importlib.import_module(module), self.layer)


def _in_proportion(config: Any, size: int, width: int) -> int:
    """Scale a hidden size to another width; a multiple of 8, from 64 on, stays one."""
    unit = 8 if size % 8 == 0 and size >= 64 else 1
    return max(1, round(size * width / config.hidden_size / unit)) * unit


def _rotary_sizes(config: Any, width: int, heads: Any) -> dict[str, Any]:
    group = config.num_attention_heads // config.num_key_value_heads
    return {
        "hidden_size": width,
        "intermediate_size": _in_proportion(config, config.intermediate_size, width),
        "num_attention_heads": heads,
        "num_key_value_heads": heads // group,
        "head_dim": head_size_of(config),
    }


def _gpt2_sizes(config: Any, width: int, heads: int | None) -> dict[str, Any]:
    inner = None if config.n_inner is None else _in_proportion(config, config.n_inner, width)
    return {"hidden_size": width, "num_attention_heads": heads, "n_inner": inner}


def _usual_sizes(config: Any, width: int, heads: int | None) -> dict[str, Any]:
    hidden = _in_proportion(config, config.intermediate_size, width)
    return {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": hidden}


def _mamba_sizes(config: Any, width: int, heads: int | None) -> dict[str, Any]:
    auto = config.time_step_rank == math.ceil(config.hidden_size / 16)
    rank = math.ceil(width / 16) if auto else config.time_step_rank
    return {"hidden_size": width, "intermediate_size": int(config.expand * width), "time_step_rank": rank}


_OUTPUTS = ("self_attn.o_proj", "mlp.down_proj")
FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaConfig", "LlamaDecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "qwen2": Family("Qwen2Config", "Qwen2DecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "qwen3": Family("Qwen3Config", "Qwen3DecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "mistral": Family("MistralConfig", "MistralDecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "phi3": Family("Phi3Config", "Phi3DecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "granite": Family("GraniteConfig", "GraniteDecoderLayer", "layers", _rotary_sizes, "any", _OUTPUTS),
    "olmo2": Family("Olmo2Config", "Olmo2DecoderLayer", "layers", _rotary_sizes, "any"),
    "olmo3": Family("Olmo3Config", "Olmo3DecoderLayer", "layers", _rotary_sizes, "any"),
    "gemma": Family("GemmaConfig", "GemmaDecoderLayer", "layers", _rotary_sizes, "any"),
    "gemma2": Family("Gemma2Config", "Gemma2DecoderLayer", "layers", _rotary_sizes, "any"),
    "gemma3_text": Family("Gemma3TextConfig", "Gemma3DecoderLayer", "layers", _rotary_sizes, "any"),
    "gpt2": Family("GPT2Config", "GPT2Block", "h", _gpt2_sizes, "divide"),
    "gpt_neox": Family("GPTNeoXConfig", "GPTNeoXLayer", "layers", _usual_sizes, "multiple"),
    "bert": Family("BertConfig", "BertLayer", "encoder.layer", _usual_sizes, "divide"),
    "roberta": Family("RobertaConfig", "RobertaLayer", "encoder.layer", _usual_sizes, "divide"),
    "mamba": Family("MambaConfig", "MambaBlock", "layers", _mamba_sizes, "divide"),
}


def head_size_of(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


# ---- configurations


class _Steps(PerLayer):
    """What the configurations of all families have in addition: widths, depths and the sizes of each step."""

    model_type: Any
    widths: Any
    step_sizes: Any
    norm_slices: Any
    num_hidden_layers: Any

    def __post_init__(self, **kwargs: Any) -> None:
        if self.widths:  # transformers makes one without arguments, to see the defaults
            check_steps(self.widths, self.depths)
            if self.num_hidden_layers is None:
                self.num_hidden_layers = sum(self.depths)
        super().__post_init__(**kwargs)  # type: ignore[misc]
        register_models(self.model_type.removeprefix("steps_"))

    def check_sizes(self) -> None:
        """Raise ValueError if a field that was changed, say by AutoConfig's keywords, does not fit the others."""
        if not self.widths:
            raise ValueError(
                f"widths: got {self.widths}, expected the widths of a plan: stepsnet.stepify makes such a configuration"
            )
        widths = [sizes["hidden_size"] for sizes in self.step_sizes or []]
        if list(self.widths) != widths:
            raise ValueError(f"widths: got {self.widths}, expected {widths}, as in step_sizes: stepify makes others")
        if len(self.depths) != len(widths):
            raise ValueError(f"depths: got {self.depths}, expected one per width of {widths}")
        if not 0 <= self.num_hidden_layers <= sum(self.depths):
            raise ValueError(
                f"num_hidden_layers: got {self.num_hidden_layers}, expected 0 to {sum(self.depths)}, the sum of depths"
            )

    def validate_architecture(self) -> None:
        """Skip transformers' check for a grown model, whose heads keep their size and need not divide the width."""
        if not self.norm_slices and hasattr(super(), "validate_architecture"):
            super().validate_architecture()  # type: ignore[misc]

    @property
    def steps(self) -> list[LayerConfig]:
        """A view of this configuration per step."""
        return [LayerConfig(self, sizes) for sizes in self.step_sizes or []]


@cache
def steps_config_class(name: str) -> Any:
    """A family's configuration class with steps; ``norm_slices`` are the slices of a grown model's last norm."""
    base = FAMILIES[name].config_class
    number_of_layers = base.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    fields: dict[str, tuple[Any, Any]] = {
        "widths": (list[int] | None, None),
        "depths": (list[int] | None, None),
        "step_sizes": (list[dict] | None, None),
        "stream_scale": (float, 1.0),
        "norm_slices": (list[int] | None, None),
        number_of_layers: (int | None, None),  # None: the sum of depths
    }
    namespace = {
        "__annotations__": {key: kind for key, (kind, _) in fields.items()},
        **{key: default for key, (_, default) in fields.items()},
        "__module__": __name__,
        "__doc__": f"{base.__name__} with the layers in steps: widths, depths, and the sizes of each step.",
        "model_type": f"steps_{name}",
        "base_model_pp_plan": None,  # pipeline stages would have to pass on the channels that wait
        "base_model_tp_plan": None,
    }
    return strict(type(f"Steps{base.__name__}", (_Steps, base), namespace))


# ---- layers and models


@cache
def _stream_layer_class(layer_class: Any) -> Any:
    """A layer class on the whole stream: a layer reads and writes the first channels, and copies the others."""

    class StreamLayer(layer_class):
        read_width: int
        stream_scale: float = 1.0

        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self.stream_scale != 1.0:
                hidden_states = hidden_states * self.stream_scale
            untouched = hidden_states.shape[-1] - self.read_width
            if untouched == 0:
                return super().forward(hidden_states, *args, **kwargs)
            y, waiting = torch.split(hidden_states, [self.read_width, untouched], -1)  # (B, N, C_i), (B, N, C - C_i)
            return torch.cat((super().forward(y, *args, **kwargs), waiting), -1)

    StreamLayer.__name__ = StreamLayer.__qualname__ = f"Steps{layer_class.__name__}"
    StreamLayer.__module__ = __name__
    return StreamLayer


def layer_of(name: str, config: Any, sizes: dict[str, Any], index: int) -> Any:
    """A layer of a family with the sizes of a step, as the library makes it."""
    return FAMILIES[name].layer_class(LayerConfig(config, sizes), index)


def _fill(name: str, model: Any, config: Any) -> None:
    """Fill the list that the constructor has left empty with as many layers of the steps as the configuration says."""
    layers = get_path(model.base_model, FAMILIES[name].layers)
    layer_class = _stream_layer_class(FAMILIES[name].layer_class)
    # a head's constructor may build its base model by an Auto class, from a copy of the configuration without layers
    model.base_model.config.num_hidden_layers = config.num_hidden_layers
    for index, view in enumerate(config.per_layer_config):
        layer = layer_class(view, index)
        layer.read_width = view.hidden_size
        layer.stream_scale = config.stream_scale if index == 0 else 1.0
        layers.append(layer)
    if config.norm_slices and not isinstance(model.base_model.norm, SliceNorm):
        model.base_model.norm = SliceNorm.like(model.base_model.norm, config.norm_slices)


@cache
def steps_class(model_class: Any) -> Any:
    """The class of a transformers model with its layers in steps, a subclass of the model's own.

    Raises:
        UserError: the model's configuration belongs to no family in the table.
    """
    name = next((key for key, row in FAMILIES.items() if model_class.config_class is row.config_class), None)
    if name is None:
        raise UserError(
            f"model: got {model_class.__name__}, whose configuration is {model_class.config_class.__name__}, expected "
            f"that of one of the families {', '.join(FAMILIES)}"
        )

    def __init__(self, config, *args, **kwargs):
        config.check_sizes()
        layers, config.num_hidden_layers = config.num_hidden_layers, 0
        # an Auto class within builds the base model from this configuration, which then has layer types but no layers
        if layers and (types := vars(config).get("layer_types")):
            config.layer_types = types[:layers]
        try:
            model_class.__init__(self, config, *args, **kwargs)
        finally:
            config.num_hidden_layers = layers
        self.config.num_hidden_layers = layers
        _fill(name, self, config)
        self.post_init()
        for part in self.modules():  # accelerate looks for a layer of each class named here
            if isinstance(part, transformers.PreTrainedModel):
                part._no_split_modules = set(part._no_split_modules or ()) - {layer}

    layer = FAMILIES[name].layer
    namespace = {
        "__init__": __init__,
        # in classes other than its own, the library does not initialize modules without direct parameters, such as
        # GPT-2's MLPs
        "is_custom_code": classmethod(lambda cls: False),
        "__module__": __name__,
        "__doc__": f"{model_class.__name__} with its layers in steps.",
        "config_class": steps_config_class(name),
        "_no_split_modules": [*(model_class._no_split_modules or []), f"Steps{layer}"],
    }
    made = type(f"Steps{model_class.__name__}", (InstalledCode, model_class), namespace)
    globals()[made.__name__] = made  # where pickle looks for it
    return made


_AUTO = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForMaskedLM",
    "AutoModelForPreTraining",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "AutoModelForQuestionAnswering",
    "AutoModelForMultipleChoice",
    "AutoModelForNextSentencePrediction",
)


@cache
def register_models(name: str) -> None:
    """Tell the Auto classes which models a family's configuration stands for; this imports the family's models."""
    base, config_class = FAMILIES[name].config_class, steps_config_class(name)
    for auto_name in _AUTO:
        auto = getattr(transformers, auto_name)
        if base in auto._model_mapping.keys():  # noqa: SIM118 - it is no mapping by its iterator
            made = steps_class(auto._model_mapping[base])
            auto.register(config_class, made, exist_ok=True)
            if auto_name == "AutoModelForCausalLM":  # by this name, Trainer knows whose labels to shift
                MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[f"steps_{name}"] = made.__name__


for _name in FAMILIES:
    _class = steps_config_class(_name)
    globals()[_class.__name__] = _class
    AutoConfig.register(f"steps_{_name}", _class, exist_ok=True)


def __getattr__(name: str) -> Any:
    """Make ``StepsLlamaForCausalLM`` and others on demand: pickle and transformers ask for them by name."""
    if row := next((row for row in FAMILIES.values() if name == f"Steps{row.layer}"), None):
        return _stream_layer_class(row.layer_class)
    model_class = getattr(transformers, name.removeprefix("Steps"), None) if name.startswith("Steps") else None
    if model_class is None or not hasattr(model_class, "config_class"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return steps_class(model_class)
