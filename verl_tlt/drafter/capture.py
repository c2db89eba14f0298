"""The policy's hidden states for recorded texts, from a plain transformers forward: training data without RL.

RL copies hidden states out of a forward that runs anyway (`verl_tlt.actor.hidden_states`). Those of a token take 28 to
64 KB for policies of 7B to 70B, so a `Library` keeps as many as its memory allows and computes the others again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl_tlt.drafter import data
from verl_tlt.drafter.model_files import Model
from verl_tlt.drafter.policy import check_aux_layers, policy_shape, read_model_config
from verl_tlt.errors import DrafterError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FORWARD_TOKENS = 8192
"""Tokens of one policy forward, padding included; a longer text goes alone."""


@dataclass(frozen=True)
class Text:
    """A prompt with its response."""

    tokens: tuple[int, ...]
    prompt_len: int
    images: tuple[str, ...] = ()
    """Files of the prompt's images."""


@dataclass(frozen=True)
class Decoder:
    """The decoder of a policy's language model."""

    model: torch.nn.Module  # takes `input_ids`
    layers: torch.nn.ModuleList  # each layer's input is the residual stream before it
    norm: torch.nn.Module  # its input is the last hidden state, its output what the head reads


def find_decoder(policy: torch.nn.Module, where: str) -> Decoder:
    """The decoder of `policy`'s language model: the module with one norm and a list of all the layers it should have.

    The decoder may lie deep in a larger model, FSDP or LoRA. No decoder, or several: a `DrafterError`, after `where`.
    """
    config = getattr(policy, "config", None)
    count = None if config is None else config.get_text_config(decoder=True).num_hidden_layers
    decoders = []
    for module in policy.modules():
        parts = dict(module.named_children())
        lists = [part for part in parts.values() if isinstance(part, torch.nn.ModuleList) and len(part) == count]
        norms = [part for name, part in parts.items() if "norm" in name]
        if len(lists) == len(norms) == 1:
            decoders.append(Decoder(module, lists[0], norms[0]))
    if len(decoders) != 1:
        raise DrafterError(
            f"{where} is a {type(policy).__name__}, in which {len(decoders) or 'no'} modules hold a list of "
            f"{count or 'decoder'} layers with one norm beside it; its language model's decoder should be the only one."
        )
    return decoders[0]


def check_loadable(policy: Model) -> None:
    """Raise a `DrafterError` where `load_policy` could load a policy by code of its own alone."""
    from transformers import CONFIG_MAPPING

    shape = policy_shape(policy)
    if shape.model_type not in CONFIG_MAPPING:
        raise DrafterError(
            f"{shape.source}: models of type {shape.model_type!r} load by code of their own, which warmup and evaluate "
            "do not run. Let a run train the drafter (+trainer.plugin=tlt)."
        )


def load_policy(policy: Model, device: torch.device | str) -> PreTrainedModel:
    """The policy as a frozen transformers model on `device`, over all GPUs where there are several."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if policy_shape(policy).nested else AutoModelForCausalLM
    several_gpus = torch.device(device).type == "cuda" and torch.cuda.device_count() > 1
    spread = {"device_map": "auto"} if several_gpus else {}
    dtype = _policy_dtype(policy, torch.device(device).type)
    model = kind.from_pretrained(policy, dtype=dtype, attn_implementation="sdpa", **spread)
    if not several_gpus:
        model = model.to(device)
    return model.eval().requires_grad_(False)


def _policy_dtype(policy: Model, device: str) -> torch.dtype | Literal["auto"]:
    """The dtype to load a policy in on a type of device; "auto": the files' own.

    A policy in float32 runs in bfloat16 on a GPU, as in engines. An x86 CPU that cannot multiply in bfloat16 takes five
    times as long in 16 bits, so every policy runs in float32 there.
    """
    if device == "cuda":
        fields = read_model_config(policy)
        in_files = fields.get("dtype") or fields.get("torch_dtype") or "float32"
        return torch.bfloat16 if in_files == "float32" else "auto"
    if device == "cpu":
        capabilities = getattr(torch.cpu, "get_capabilities", dict)
        cpu: dict[str, object] = capabilities()
        if cpu.get("architecture") == "x86_64" and not (cpu.get("avx512_bf16") or cpu.get("amx_bf16")):
            return torch.float32
    return "auto"


ImageInputs = Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
"""What a policy's processor makes of images in these files, as arguments of the policy: pixels, and their places."""


class PolicyStates:
    """Computes the hidden states that a drafter learns from; without `aux_layers` the last states alone (MTP).

    `image_inputs` is needed for texts with images.
    """

    def __init__(
        self, policy: PreTrainedModel, aux_layers: Sequence[int], image_inputs: ImageInputs | None = None
    ) -> None:
        self._policy = policy
        self._image_inputs = image_inputs
        decoder = find_decoder(policy, "the policy")
        if aux_layers:
            check_aux_layers(aux_layers, len(decoder.layers), "aux_layers")
        self.aux_layers = tuple(aux_layers)
        self._decoder = decoder.model
        embedding = policy.get_input_embeddings().weight  # [V, H]
        self._device = embedding.device
        self._vocabulary = embedding.shape[0]
        self._states: dict[int | str, torch.Tensor] = {}
        for index in self.aux_layers:
            decoder.layers[index].register_forward_pre_hook(self._keep(index), with_kwargs=True)
        # The final norm's input: what transformers returns as the last hidden state is already normed.
        decoder.norm.register_forward_pre_hook(self._keep("last"), with_kwargs=True)

    def _keep(self, name: int | str) -> Callable[..., None]:
        def hook(_module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            self._states[name] = args[0] if args else kwargs["hidden_states"]  # [B, L, H]

        return hook

    @torch.no_grad()
    def __call__(self, texts: Sequence[Text]) -> list[data.TrainingSequence]:
        """A sequence for each text, in order, on the host, in the policy's dtype; from one forward, right-padded."""
        for text in texts:
            length = len(text.tokens)
            if length == 0:
                raise DrafterError("A text without tokens has no hidden states.")
            if not 0 <= text.prompt_len <= length:
                raise DrafterError(f"prompt_len={text.prompt_len} must be 0..{length}, the tokens of the text.")
        ids = pad_sequence([torch.tensor(text.tokens) for text in texts], batch_first=True)  # int64 [B, L]
        data.check_tokens(ids, self._vocabulary)
        self._forward(ids.to(self._device), [file for text in texts for file in text.images])
        states = self._states
        self._states = {}
        sequences = []
        for i, text in enumerate(texts):
            length = len(text.tokens)
            inputs = [states[layer][i, :length].to("cpu", copy=True) for layer in self.aux_layers]
            last = states["last"][i, :length].to("cpu", copy=True)
            aux = torch.cat([last[:, :0], *inputs], dim=-1)  # [L, 3H], or [L, 0] without any
            sequences.append(data.TrainingSequence(ids[i, :length].clone(), text.prompt_len, aux, last))
        return sequences

    def _forward(self, ids: torch.Tensor, images: Sequence[str]) -> None:
        if not images:
            self._decoder(input_ids=ids, use_cache=False)
            return
        assert self._image_inputs is not None
        inputs = {name: value.to(self._device) for name, value in self._image_inputs(images).items()}
        is_image = (ids == self._policy.config.image_token_id).int()  # an image's tokens have positions of their own
        self._policy.base_model(input_ids=ids, mm_token_type_ids=is_image, use_cache=False, **inputs)


class Library:
    """Texts with their hidden states, computed on first use.

    Up to `max_bytes` of them are kept. Others are computed again, unless they were in the call before: the windows of a
    long text are asked for one after the other.
    """

    def __init__(self, states: PolicyStates, texts: Sequence[Text], max_bytes: int) -> None:
        self.states, self.texts, self.max_bytes = states, texts, max_bytes
        self.nbytes = 0
        self._cached: dict[int, data.TrainingSequence] = {}
        self._last: dict[int, data.TrainingSequence] = {}  # what the last call returned

    def get(self, numbers: Sequence[int]) -> list[data.TrainingSequence]:
        """The sequences of the texts with these numbers, in this order."""
        found = {n: self._cached[n] for n in numbers if n in self._cached}
        found |= {n: self._last[n] for n in numbers if n in self._last}
        self._last = {}  # their memory is free before others are computed
        missing = sorted(set(numbers) - found.keys(), key=lambda n: len(self.texts[n].tokens))
        for group in data.grouped(missing, lambda n: len(self.texts[n].tokens), FORWARD_TOKENS, padded=True):
            for number, sequence in zip(group, self.states([self.texts[n] for n in group]), strict=True):
                found[number] = sequence
                if self.nbytes + sequence.nbytes <= self.max_bytes:
                    self._cached[number] = sequence
                    self.nbytes += sequence.nbytes
        self._last = found
        return [found[n] for n in numbers]


@dataclass(frozen=True)
class Span:
    """Tokens `begin:end` of text `number`."""

    number: int
    begin: int
    end: int


def plan_epoch(lengths: Sequence[int], budget: int, seed: Sequence[int]) -> list[list[Span]]:
    """One pass over all texts as packed batches of at most `budget` rows, determined by lengths and seed alone."""
    order = np.random.default_rng(list(seed)).permutation(len(lengths)).tolist()
    spans = (Span(n, begin, end) for n in order for begin, end in data.window_bounds(lengths[n], budget))
    return list(data.grouped(spans, lambda span: span.end - span.begin - 1, budget))
