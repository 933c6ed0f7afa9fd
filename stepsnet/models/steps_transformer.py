"""Steps-Transformer: LLaMA's decoder layers in steps of increasing width, as a transformers model.

The paper's six models are TABLE_4 in ``paper/tables.py``: vocabulary 50,000, RMSNorm, SwiGLU, RoPE, tied embedding.

The layers are transformers' own, each with the width of its step; what differs from LLaMA is the residual stream
between them, which follows the rule of :class:`stepsnet.StepsNet`. With one step the model *is* transformers' LLaMA:
the same keys, weights and logits. The models that stepify makes from those of transformers are in
transformers_families.py.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaPreTrainedModel,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from ..errors import nearest
from ..plan import USUAL_HEADS, check_heads, check_steps, even_heads_of, heads_for, per_block
from ..residual.connected import ConnectedBlock
from ..residual.design import DesignPart
from ..residual.joining import wire_steps
from ..stream import change_width, cut_stream
from .layer_config import InstalledCode, LayerConfig, PerLayer
from .slice_norm import SliceNorm

__all__ = ["StepsTransformerConfig", "StepsTransformerForCausalLM", "StepsTransformerModel"]

VOCABULARY = 50_000  # tokens, for WikiText-103

PerStep = Any  # an integer, or a list with one integer per step; checked in __post_init__


@strict
class StepsTransformerConfig(PerLayer, LlamaConfig):
    """LLaMA's configuration with lists, one entry per step, in place of one width and depth.

    Args:
        widths: C_1 … C_n in the order of execution, positive integers; the largest, C, is the width of the embedding
            and of the head.
        depths: decoder layers of each step.
        num_attention_heads: heads of each step; by default those with an even size nearest to 64.
        num_key_value_heads: key and value heads of each step; by default ``num_attention_heads``.
        intermediate_size: SwiGLU's hidden size in each step; by default 8/3 of the width, which gives
            Table 4's parameters (rounded to a multiple of 8, the row of 44M would have 45M).
        residual: the design of each step's residual stream, a key of ``stepsnet.residual.DESIGNS``.
        residual_options: options of the design, such as ``{"streams": 4}``.
        embedding_scale: factor on the embedding's output. LLaMA has 1, which leaves z_0 at the standard deviation of
            the initialization, 0.02: the residuals of a step then grow far larger than the channels that wait.
        embedding_initializer_range: initial standard deviation of the embedding, and of a tied head; by default
            ``initializer_range``, as for all weights.
        norm_slices: in a grown model, widths of the slices that the last norm normalizes separately; by default it
            normalizes the whole stream.
        **kwargs: other arguments of LlamaConfig. ``hidden_size`` and ``num_hidden_layers`` follow from the steps; with
            fewer layers than the steps have, the stream ends after that many.

    A single integer stands for a list of one. ``attention_bias`` and ``mlp_bias`` are off, embeddings are tied.

    Raises:
        ValueError: widths and depths that do not match, heads that do not divide a width, or an odd head size, which
            rotary embeddings cannot rotate.
    """

    model_type = "steps_transformer"
    base_model_pp_plan = None  # pipeline stages would have to pass on the channels that wait
    base_model_tp_plan = None

    widths: PerStep = (192, 272, 384)
    depths: PerStep = (6, 3, 3)
    hidden_size: int | None = None
    num_hidden_layers: int | None = None
    vocab_size: int = VOCABULARY
    num_attention_heads: PerStep = None
    num_key_value_heads: PerStep = None
    intermediate_size: PerStep = None
    embedding_scale: int | float = 1.0
    embedding_initializer_range: int | float | None = None
    residual: str = "plain"
    residual_options: dict[str, Any] | None = None
    norm_slices: list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs):
        self.widths, self.depths = _per_step("widths", self.widths), _per_step("depths", self.depths)
        check_steps(self.widths, self.depths)
        heads = self.num_attention_heads
        # an odd width has no heads of even size; its heads are refused below, as a caller's would be
        even = [heads_for(width, 64, even_heads_of(width) or USUAL_HEADS) for width in self.widths]
        self.num_attention_heads = even if heads is None else _per_step("num_attention_heads", heads)
        check_heads(self.widths, self.num_attention_heads, name="num_attention_heads")
        for name, default in (
            ("num_key_value_heads", self.num_attention_heads),
            ("intermediate_size", [round(8 * width / 3) for width in self.widths]),
        ):
            given = getattr(self, name)
            setattr(self, name, list(default) if given is None else _per_step(name, given))
        width, embedding_heads = max(zip(self.widths, self.num_attention_heads))
        following = {"hidden_size": width, "num_hidden_layers": sum(self.depths), "head_dim": width // embedding_heads}
        for name, value in following.items():
            if name == "num_hidden_layers" and self.num_hidden_layers and 0 < self.num_hidden_layers < value:
                continue  # the stream ends after that many
            if getattr(self, name) not in (type(self).__dataclass_fields__[name].default, value):
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, expected widths, depths and num_attention_heads, from which "
                    f"it follows: {value}"
                )
            setattr(self, name, value)
        rope = self.rope_parameters or kwargs.get("rope_scaling") or {}
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            raise ValueError(
                "rope_type: got longrope, whose factors are for one head size, expected another type, such as yarn"
            )
        super().__post_init__(**kwargs)
        self.validate_architecture()  # called here, it raises a plain ValueError

    def validate_architecture(self):
        steps = len(self.widths)
        for name in ("depths", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if isinstance(value := getattr(self, name), int) or len(value) != steps:
                raise ValueError(f"{name}: got {value}, expected one per width of {self.widths}")
        for name in ("num_key_value_heads", "intermediate_size", "norm_slices"):
            value = getattr(self, name)
            if value is not None and not all(type(number) is int and number >= 1 for number in value):
                raise ValueError(f"{name}: got {value}, expected integers of at least 1")
        width, heads = max(zip(self.widths, self.num_attention_heads))
        for name, value in (("hidden_size", width), ("head_dim", width // heads)):
            if getattr(self, name) != value:  # an existing configuration was changed
                raise ValueError(
                    f"{name}: got {getattr(self, name)}, expected {value}, from widths {self.widths} and "
                    f"num_attention_heads {self.num_attention_heads}: a new configuration derives it"
                )
        for name in ("embedding_scale", "embedding_initializer_range"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name}: got {value}, expected a number above 0")
        layers, most = self.num_hidden_layers or 0, sum(self.depths)
        if not min(1, most) <= layers <= most:
            raise ValueError(f"num_hidden_layers: got {layers}, expected 1 to {most}, the sum of depths")
        if self.norm_slices and sum(self.norm_slices) != self.hidden_size:
            raise ValueError(f"norm_slices: got {self.norm_slices}, expected a sum of {self.hidden_size}, the width")
        for width, heads, shared in zip(self.widths, self.num_attention_heads, self.num_key_value_heads):
            if heads % shared:
                raise ValueError(f"num_key_value_heads: got {shared}, expected a divisor of the {heads} heads")
            if width // heads % 2:
                even = "an even size" if width % 2 == 0 else "an even width, as stepsnet plan --round-to 2 gives"
                raise ValueError(
                    f"num_attention_heads: got {heads} at width {width}, heads of size {width // heads}, expected "
                    f"{even}: rotary embeddings rotate pairs of channels"
                )

    def to_diff_dict(self):
        """Always include the number of layers: it may be the default, but not the number that ``depths`` add up to."""
        return {**super().to_diff_dict(), "num_hidden_layers": self.num_hidden_layers}

    @property
    def steps(self) -> list[LayerConfig]:
        """A view of this configuration per step."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        heads = self.num_attention_heads
        head_dims = [width // number for width, number in zip(self.widths, heads)]
        values = zip(self.widths, self.intermediate_size, heads, self.num_key_value_heads, head_dims)
        return [LayerConfig(self, dict(zip(names, of_step))) for of_step in values]


def _per_step(name: str, values: PerStep) -> list[int]:
    if not isinstance(values, int | list | tuple):
        raise ValueError(f"{name}: got {values!r}, expected an integer, or a list with one per step")
    return [values] if isinstance(values, int) else list(values)


class StepsTransformerPreTrainedModel(InstalledCode, LlamaPreTrainedModel):
    config_class = StepsTransformerConfig
    config: StepsTransformerConfig
    _no_split_modules: Any = None  # set for each model, since a design's blocks have their own classes
    _can_record_outputs = {"attentions": LlamaAttention}  # noqa: RUF012 - hidden states are collected in forward

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DesignPart | ScaledEmbedding):
            module.init_weights()
        elif isinstance(module, ConnectedBlock):
            module.init_branches()

    def _initialize_weights(self, module: nn.Module, is_custom_code: bool = False) -> None:
        """Let parts of a design initialize the weights within them; the library skips modules without own weights."""
        if isinstance(module, DesignPart | ConnectedBlock):
            is_custom_code = all(getattr(weight, "_is_hf_initialized", False) for weight in module.parameters())
        super()._initialize_weights(module, is_custom_code)


class ScaledEmbedding(nn.Embedding):
    """Token ids (B, N) -> z_0 (B, N, C), scaled; a head that shares the weights uses them unscaled."""

    def __init__(self, config: StepsTransformerConfig):
        super().__init__(config.vocab_size, max(config.widths), config.pad_token_id)
        self.scale = config.embedding_scale
        self.initializer_range = config.embedding_initializer_range

    @property
    def embed_scale(self) -> Tensor:
        """The scale under the name that it has in transformers' scaled embeddings, which PEFT looks for."""
        return torch.tensor(self.scale, device=self.weight.device)

    def init_weights(self) -> None:
        """Initialize an embedding that has its own standard deviation; any other keeps transformers' initialization."""
        if self.initializer_range is None or getattr(self.weight, "_is_hf_initialized", False):  # read from a file
            return
        nn.init.normal_(self.weight, std=self.initializer_range)
        if self.padding_idx is not None:
            nn.init.zeros_(self.weight[self.padding_idx])

    def forward(self, input: Tensor) -> Tensor:
        embedded = super().forward(input)
        return embedded if self.scale == 1.0 else embedded * self.scale


class StepsTransformerModel(StepsTransformerPreTrainedModel):
    """The decoder: token ids (B, N) -> (B, N, C).

    ``layers`` is one list over all steps, as in LLaMA. ``hidden_states`` are the whole residual stream after each
    layer, both what it wrote and the channels that wait, so that all have the width C. With a
    ``config.num_hidden_layers`` below the number of layers, the stream ends after that many, as in LLaMA; the others
    are kept, but do not run.
    """

    def __init__(self, config: StepsTransformerConfig):
        super().__init__(config)
        config.validate_architecture()  # AutoConfig's keywords change an existing one
        steps = config.steps
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = ScaledEmbedding(config)
        of_layers = enumerate(per_block(steps, config.depths))  # including those that do not run
        self.layers = nn.ModuleList(LlamaDecoderLayer(step, index) for index, step in of_layers)
        steps_layers, options = list(self.layers_of_steps()), config.residual_options or {}
        wirings = wire_steps(steps_layers, config.widths, config.residual, options)
        self.streams = None if wirings is None else nn.ModuleList(wirings)  # the wiring of each step's stream
        self.slice_widths, self.slices_read = cut_stream(config.widths)
        self.norm: nn.Module = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if config.norm_slices:
            self.norm = SliceNorm.like(self.norm, config.norm_slices)
        self.rotary_embs = nn.ModuleList(LlamaRotaryEmbedding(step) for step in steps)  # head sizes differ
        self.gradient_checkpointing = False
        self._no_split_modules = {type(layer).__name__ for layer in self.layers}
        self.post_init()

    def layers_of_steps(self) -> Iterator[list[nn.Module]]:
        """The layers of each step."""
        start = 0
        for depth in self.config.depths:
            yield list(self.layers[start : start + depth])
            start += depth

    def _states_to_keep(self, asked: bool | int | list[int] | None) -> set[int]:
        """Which of the states after 0, 1, … layers ``output_hidden_states`` asks for."""
        number = (self.config.num_hidden_layers or 0) + 1
        if not asked or asked is True:
            return set(range(number)) if asked else set()
        indices = [asked] if isinstance(asked, int) else asked
        return {index % number for index in indices if -number <= index < number}

    @capture_outputs
    @merge_with_config_defaults  # inside the other, which hides the order of the arguments
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids: (B, N), or inputs_embeds: (B, N, C); masks, positions and cache as in LlamaModel."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # (B, N, C)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        mask = create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            position_ids=position_ids,  # only a caller's can pack several texts; looking for those makes a GPU wait
        )
        if position_ids is None:
            seen = past_key_values.get_seq_length() if past_key_values is not None else 0
            position_ids = (torch.arange(x.shape[1], device=x.device) + seen).unsqueeze(0)
        asked = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        kept = self._states_to_keep(asked)
        hidden_states: list[Tensor | None] = [x if 0 in kept else None]
        y = x
        waiting: list[Tensor] = []
        left = self.config.num_hidden_layers or 0
        for step, layers in enumerate(self.layers_of_steps()):
            layers, left = layers[:left], max(0, left - len(layers))
            y, waiting = change_width(y, waiting, self.slices_read[step], self.slice_widths, -1)  # y: (B, N, C_i)
            position_embeddings = self.rotary_embs[step](y, position_ids=position_ids.to(y.device))
            # a step that is not reached, if fewer layers run, leaves the stream as it is
            wiring: Any = self.streams[step] if self.streams is not None and layers else None
            state = wiring.start(y) if wiring else y
            for layer in layers:
                state = layer(
                    state,
                    attention_mask=mask,
                    position_embeddings=position_embeddings,
                    position_ids=position_ids,
                    past_key_values=past_key_values,
                    use_cache=use_cache,
                    **kwargs,
                )
                whole = None
                if len(hidden_states) in kept:
                    read = wiring.end(state) if wiring else state
                    whole, _ = change_width(read, waiting, len(self.slice_widths), self.slice_widths, -1)
                    if not wiring:  # the next layer reads what is returned, so that this has a gradient
                        state, waiting = change_width(whole, [], self.slices_read[step], self.slice_widths, -1)
                hidden_states.append(whole)
            y = wiring.end(state) if wiring else state
        y, _ = change_width(y, waiting, len(self.slice_widths), self.slice_widths, -1)  # (B, N, C)
        y = self.norm(y)
        tie_last = getattr(self.config, "tie_last_hidden_states", None)  # None, like a missing attribute, means True
        if hidden_states[-1] is not None and tie_last is not False:
            hidden_states[-1] = y  # after the norm, as in transformers' models
        return BaseModelOutputWithPast(
            last_hidden_state=y,
            past_key_values=past_key_values,
            hidden_states=tuple(hidden_states) if asked else None,
        )


class StepsTransformerForCausalLM(StepsTransformerPreTrainedModel, GenerationMixin):
    """The decoder and its head, which shares the embedding's weights unless ``tie_word_embeddings`` is off."""

    _tied_weights_keys = LlamaForCausalLM._tied_weights_keys
    forward = LlamaForCausalLM.forward  # token ids (B, N) -> logits (B, N, vocab_size), plus the loss if given labels

    def __init__(self, config: StepsTransformerConfig):
        super().__init__(config)
        self.model = StepsTransformerModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(max(config.widths), config.vocab_size, bias=False)
        self.post_init()


class StepsTransformerForSequenceClassification(GenericForSequenceClassification, StepsTransformerPreTrainedModel):
    """A class for each text, from the decoder's output at its last token: (B, N) -> logits (B, num_labels)."""


class StepsTransformerForTokenClassification(GenericForTokenClassification, StepsTransformerPreTrainedModel):
    """A class for each token: (B, N) -> logits (B, N, num_labels)."""


class StepsTransformerForQuestionAnswering(GenericForQuestionAnswering, StepsTransformerPreTrainedModel):
    """Where an answer begins and ends in a text: (B, N) -> start_logits and end_logits (B, N)."""


def create(**kwargs: Any) -> StepsTransformerForCausalLM:
    """A new model from the arguments of :class:`StepsTransformerConfig`.

    Raises:
        ValueError: an unknown argument, one that follows from the steps, or a value that the configuration does not
            accept.
    """
    if derived := [key for key in ("hidden_size", "num_hidden_layers", "head_dim") if key in kwargs]:
        raise ValueError(
            f"{derived[0]}: got {kwargs[derived[0]]!r}, expected widths, depths and num_attention_heads, from which it "
            "follows"
        )
    known = StepsTransformerConfig.__dataclass_fields__
    if unknown := [key for key in kwargs if key not in known]:
        hint = nearest(unknown[0], known)
        raise ValueError(
            f"got an unknown argument {unknown[0]!r}, expected an argument of StepsTransformerConfig{hint}"
        )
    try:
        return StepsTransformerForCausalLM(StepsTransformerConfig(**kwargs))
    except StrictDataclassError as error:  # a value of the wrong type
        raise ValueError(str(error.__cause__ or error)) from error


AutoConfig.register("steps_transformer", StepsTransformerConfig)
AutoModel.register(StepsTransformerConfig, StepsTransformerModel)
AutoModelForCausalLM.register(StepsTransformerConfig, StepsTransformerForCausalLM)
# by this name, Trainer knows whose labels to shift
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["steps_transformer"] = StepsTransformerForCausalLM.__name__
AutoModelForSequenceClassification.register(StepsTransformerConfig, StepsTransformerForSequenceClassification)
AutoModelForQuestionAnswering.register(StepsTransformerConfig, StepsTransformerForQuestionAnswering)
AutoModelForTokenClassification.register(StepsTransformerConfig, StepsTransformerForTokenClassification)
