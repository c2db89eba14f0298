"""Ways to make and train an EAGLE-3 head that differ in one thing, and heads of another shape that show what it is for.

`base` is the head that runs had before this comparison. `mtp` is shaped as a policy's own MTP head, but reads the three
states of EAGLE-3: no engine serves it so. Each other recipe is one of these two with one change.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Qwen3Config
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from benchmarks.drafter.corpora import AUX, Corpus
from verl_tlt.drafter import drafter_config, refresh_verifier_weights
from verl_tlt.drafter.build import begin_at_the_token, instantiate
from verl_tlt.drafter.train import BETAS, CLIP


@dataclass(frozen=True)
class Recipe:
    """One way to make and train a head."""

    norms: tuple[str, ...] = ("norm_before_residual",)
    """Switches of `Eagle3SpeculatorConfig` that are on."""
    init: str = "normal"
    """Of matrices: `normal` with deviation 0.02; `uniform`, torch's for linear layers; `token`, `begin_at_the_token`;
    `tied`, its queries and keys alone; `last`, the state that the head reads is the last of the three; `small`,
    what attention and MLP add begins at a tenth."""
    width: int | None = None
    """Of the MLP; None: the policy's."""
    query_norms: bool = False
    """Queries and keys are normed, as in Qwen3."""
    mixed: bool = False
    """Token and state go through one matrix into the residual stream, before the layer, as in MTP."""
    passes: int = 3
    grows: int = 0
    """Add a pass whenever the last position is right in more than half of the drafts, up to so many."""
    learning_rate: float = 2e-3
    decays: bool = False
    """Linearly to a tenth at the end."""
    rows: int = 512
    loss: str = "kl_div"
    betas: tuple[float, float] = BETAS
    clip: float = CLIP
    muon: bool = False
    """Matrices by Muon, the rest by AdamW."""

    @property
    def unrolled(self) -> list[int]:
        """How many passes its steps have."""
        return list(range(self.passes, self.grows + 1)) or [self.passes]


BASE = Recipe()
MTP = Recipe(norms=("norm_output",), init="uniform", query_norms=True, mixed=True)
_RESIDUAL = "norm_before_residual"
RECIPES = {
    "base": BASE,
    "mtp": MTP,
    # the head
    "norm_output": replace(BASE, norms=(_RESIDUAL, "norm_output")),
    "fc_norm": replace(BASE, norms=(_RESIDUAL, "fc_norm")),
    "both norms": replace(BASE, norms=(_RESIDUAL, "norm_output", "fc_norm")),
    "norm_before_fc": replace(BASE, norms=(_RESIDUAL, "norm_before_fc")),
    "residual not normed": replace(BASE, norms=()),
    "query norms": replace(BASE, query_norms=True),
    "mixed": replace(BASE, mixed=True),
    "init uniform": replace(BASE, init="uniform"),
    "init tied": replace(BASE, init="tied"),
    "init token": replace(BASE, init="token"),
    "init last": replace(BASE, init="last"),
    "init small": replace(BASE, init="small"),
    "width x2": replace(BASE, width=2),
    "width x0.5": replace(BASE, width=0),
    # the training
    "passes 1": replace(BASE, passes=1),
    "passes 2": replace(BASE, passes=2),
    "passes 7": replace(BASE, passes=7),
    "passes grow to 3": replace(BASE, grows=3, passes=1),
    "passes grow to 7": replace(BASE, grows=7, passes=1),
    "rate 1e-3": replace(BASE, learning_rate=1e-3),
    "rate 4e-3": replace(BASE, learning_rate=4e-3),
    "rate decays": replace(BASE, decays=True),
    "rows 256": replace(BASE, rows=256),
    "rows 1024": replace(BASE, rows=1024),
    "beta2 0.99": replace(BASE, betas=(0.9, 0.99)),
    "beta1 0.95": replace(BASE, betas=(0.95, 0.95)),
    "no clip": replace(BASE, clip=1e9),
    "muon": replace(BASE, muon=True),
    "loss ce": replace(BASE, loss="ce"),
    "loss lk_hybrid": replace(BASE, loss="lk_hybrid"),
    # several at once
    "token, grow to 7": replace(BASE, init="token", grows=7, passes=1),
    "token, grow to 3": replace(BASE, init="token", grows=3, passes=1),
    "token, norm_output": replace(BASE, init="token", norms=(_RESIDUAL, "norm_output")),
    "token, rate 4e-3": replace(BASE, init="token", learning_rate=4e-3),
    "token, muon": replace(BASE, init="token", muon=True),
    "mtp, grow to 7": replace(MTP, grows=7, passes=1),
    # MTP's shape without one of its parts
    "mtp, output not normed": replace(MTP, norms=()),
    "mtp, not mixed": replace(MTP, mixed=False, norms=(_RESIDUAL, "norm_output")),
    "mtp, no query norms": replace(MTP, query_norms=False),
    "mtp, init normal": replace(MTP, init="normal"),
    "mtp, rate 4e-3": replace(MTP, learning_rate=4e-3),
}


class Muon(torch.optim.AdamW):
    """AdamW, but for matrices momentum made orthogonal in five Newton-Schulz steps (Jordan et al. 2024), in float32,
    times 0.2 sqrt(longer side), so that AdamW's learning rates serve (Liu et al. 2025).
    """

    MOMENTUM = 0.95

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As any optimizer's."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim != 2 or p.grad is None:
                    continue
                momentum = self.state[p]["exp_avg"].mul_(self.MOMENTUM).add_(p.grad)
                update = _orthogonal(p.grad + self.MOMENTUM * momentum)
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)
                p.grad = None
        super().step(closure)


def _orthogonal(x: torch.Tensor) -> torch.Tensor:
    """The nearest matrix with singular values near one."""
    wide = x if x.shape[0] <= x.shape[1] else x.T
    wide = wide / (wide.norm() + 1e-7)
    for _ in range(5):
        a = wide @ wide.T
        wide = 3.4445 * wide + (-4.775 * a + 2.0315 * a @ a) @ wide
    return wide if x.shape[0] <= x.shape[1] else wide.T


class MixedLayer(torch.nn.Module):
    """A whole decoder layer behind [norm(embedding), norm(state)] @ W, as `mtp.*` of Qwen3.5."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.embedding_norm, self.state_norm = LlamaRMSNorm(hidden, eps), LlamaRMSNorm(hidden, eps)
        self.mix = torch.nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = (Qwen3DecoderLayer if config.model_type == "qwen3" else LlamaDecoderLayer)(config, 0)
        for module in self.modules():
            if isinstance(module, torch.nn.Linear):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, hidden_states: torch.Tensor, **rest: Any) -> Any:
        """[1, S, 2H] to [1, S, H]."""
        embedding, state = hidden_states.chunk(2, dim=-1)
        both = torch.cat([self.embedding_norm(embedding), self.state_norm(state)], dim=-1)
        return self.layer(self.mix(both), **rest)


def new_head(corpus: Corpus, recipe: Recipe, seed: int) -> Any:
    """A random head for the corpus's policy, which the gate's walk and the trainer take as any other."""
    config = drafter_config(corpus.policy, aux_layers=AUX, max_position_embeddings=512)
    layer = config.transformer_layer_config
    if recipe.width is not None:
        layer.intermediate_size = layer.intermediate_size * recipe.width or layer.intermediate_size // 2
    if recipe.query_norms:
        fields = {key: value for key, value in layer.to_dict().items() if key not in ("model_type", "architectures")}
        config.transformer_layer_config = layer = Qwen3Config(**fields)
    for switch in ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc"):
        setattr(config, switch, switch in recipe.norms)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = instantiate(config, "tlt_by_document")
        if recipe.mixed:
            model.layers[0] = MixedLayer(model.config.transformer_layer_config)
        _begin(model, recipe.init)
    refresh_verifier_weights(model, corpus.weights)
    return model


@torch.no_grad()
def _begin(model: Any, init: str) -> None:
    """Give the trained matrices their first values."""
    layer = model.layers[0]
    hidden = model.hidden_size
    if init == "uniform":
        for module in (model.fc, *layer.modules()):
            if isinstance(module, torch.nn.Linear):
                module.reset_parameters()
    elif init in ("tied", "token"):
        attention = layer.self_attn
        values = [projection.weight.clone() for projection in (attention.v_proj, attention.o_proj)]
        begin_at_the_token(model)
        if init == "tied":
            for projection, value in zip((attention.v_proj, attention.o_proj), values, strict=True):
                projection.weight.copy_(value)
    elif init == "last":
        model.fc.weight[:, -hidden:] += torch.eye(hidden)
    elif init == "small":
        layer.self_attn.o_proj.weight.mul_(0.1)
        layer.mlp.down_proj.weight.mul_(0.1)
