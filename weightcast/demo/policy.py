"""The policy of the demo: a small decoder in plain torch with the tensor names and shapes of a Llama checkpoint.

Forward runs in FP32, which are the optimiser's masters too; the exported weights are BF16, as in any RL run.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """Sizes of the model; the default has 10.6 million parameters and an odd vocabulary, so shards are uneven."""

    vocabulary: int = 97
    width: int = 384
    inner: int = 1024
    layers: int = 6
    heads: int = 6
    key_value_heads: int = 6
    context: int = 16
    theta: float = 10_000.0
    epsilon: float = 1e-5

    def to_hugging_face(self) -> dict[str, object]:
        """Return the ``config.json`` with which an engine loads the exported files."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.key_value_heads,
            "head_dim": self.width // self.heads,
            "max_position_embeddings": self.context,
            "rms_norm_eps": self.epsilon,
            "rope_theta": self.theta,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
        }


class _Attention(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self._head_width = config.width // config.heads
        key_value_width = self._head_width * config.key_value_heads
        self.q_proj = nn.Linear(config.width, config.width, bias=False)
        self.k_proj = nn.Linear(config.width, key_value_width, bias=False)
        self.v_proj = nn.Linear(config.width, key_value_width, bias=False)
        self.o_proj = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        q, k, v = (self._split(linear(x)) for linear in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(
            _rotate(q, rotation), _rotate(k, rotation), v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1]
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._head_width).transpose(1, 2)


class _Mlp(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.inner, bias=False)
        self.up_proj = nn.Linear(config.width, config.inner, bias=False)
        self.down_proj = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class _Layer(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.width, eps=config.epsilon)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.width, eps=config.epsilon)
        self.mlp = _Mlp(config)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation)
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]


class _Decoder(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=config.epsilon)

    def forward(self, tokens: Tensor, rotation: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x, rotation)
        return self.norm(x)  # type: ignore[no-any-return]


class Policy(nn.Module):
    """Maps tokens, int64[batch, time], to logits, float32[batch, time, vocabulary]. Embedding and head are tied."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self._config = config
        self.model = _Decoder(config)
        self.lm_head = nn.Linear(config.width, config.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def layers(self) -> list[nn.Module]:
        """The blocks that FSDP shards one by one."""
        return list(self.model.layers)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each position."""
        rotation = _rotation(self._config, tokens.shape[1])
        return self.lm_head(self.model(tokens, rotation))  # type: ignore[no-any-return]


def _rotation(config: PolicyConfig, length: int) -> Tensor:
    """Rotary angles as float32[2, time, head_dim]: cosines and sines."""
    half = config.width // config.heads // 2
    frequency = config.theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
    return torch.stack([angle.cos(), angle.sin()]).repeat(1, 1, 2)


def _rotate(x: Tensor, rotation: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * rotation[0] + torch.cat([-right, left], dim=-1) * rotation[1]
