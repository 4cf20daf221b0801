"""Models of real size with random weights: what rounds cost where no such checkpoint is at hand.

Random weights cost what trained ones cost, in time and memory; what they say, and what they accept
of a draft, says nothing. So they are for `bench` alone, with a scripted drafter, whose acceptance
is an input. 4-bit codes in groups of 64 with scale and bias, as models of this size are kept; all
layers have the same values, each in memory of its own, so that every one of them is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slipstream.bench.model import Model
from slipstream.config import EngineConfig
from slipstream.engine.engine import Engine
from slipstream.engine.load import choose_backend
from slipstream.engine.pairing import Pairing
from slipstream.engine.target import build_target
from slipstream.errors import ConfigError
from slipstream.kernels.ops import Backend
from slipstream.models.arch import Arch, AttentionArch, plain_frequencies, score_scale
from slipstream.models.decoder import DecoderWeights, LayerWeights
from slipstream.models.weights import DenseTensor, QuantizedTensor

PREFIX = "random:"
GROUP = 64
_CODE_DEVIATION, _MIDDLE_CODE = 4.61, 7.5  # of codes uniform in 0..15
_SHARP = 4.0  # gain of the output, so that logits are as far apart as a trained model's


def shape(
    *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, **fields: Any
) -> Arch:
    """Return a decoder of equal layers; `fields` are the rest of `Arch`."""
    attention = AttentionArch(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        frequencies=plain_frequencies(head_dim, 1e6),
        rope_interleaved=False,
        scale=score_scale(head_dim),
    )
    common: dict[str, Any] = {"family": "random", "context_len": 40_960, "norm_eps": 1e-6}
    return Arch(
        num_layers=num_layers,
        attention=(attention,) * num_layers,
        kv_layers=tuple(range(num_layers)),
        **(common | fields),
    )


SHAPES = {
    "8b": shape(
        num_layers=32,
        hidden_size=4096,
        ffn_size=14336,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=128_256,
        tied_embedding=False,
    ),
    "12b": shape(
        num_layers=48,
        hidden_size=3840,
        ffn_size=15360,
        num_heads=16,
        num_kv_heads=8,
        head_dim=256,
        vocab_size=262_144,
        tied_embedding=True,
    ),
}


class Bytes:
    """A tokenizer for models without one: a text's bytes are its ids, and replies have no text."""

    vocab_size = 256
    stop_ids = frozenset[int]()
    control_ids = frozenset[int]()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte that an id below 256 is."""
        return bytes([token_id]) if token_id < self.vocab_size else b""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Return the text's UTF-8 bytes."""
        return list(text.encode())

    def has_more_ids(self, text: str, limit: int) -> int:
        """Return 0: texts are encoded to be counted."""
        return 0

    def detokenizer(self) -> Bytes:
        """Return what spells nothing."""
        return self

    def push(self, token_ids: Sequence[int]) -> str:
        """Return no text."""
        return ""

    def finish(self) -> str:
        """Return no text."""
        return ""


class Synthetic:
    """Draws a shape's weights once and builds models of one back end around them.

    Args:
        name: as on the command line, e.g. "random:12b".

    Raises:
        ConfigError: there is no such shape.
    """

    def __init__(self, name: str) -> None:
        shape = name.removeprefix(PREFIX)
        if shape not in SHAPES:
            raise ConfigError(
                f"random weights come in the shapes {', '.join(SHAPES)}, got {shape!r}",
                hint=f"e.g. {PREFIX}12b",
            )
        self.name = name
        self._arch = SHAPES[shape]
        self._weights: DecoderWeights | None = None

    def model(self, config: EngineConfig, **settings: Any) -> Model:
        """Return a model; settings go before the config.

        Raises:
            LoadError, CapacityError: the back end cannot serve it.
        """
        own = dataclasses.replace(config, **(settings | {"profile": "off", "drafter": "none"}))
        target = build_target(self._arch, choose_backend(own), self._load, own)
        pairing = Pairing.fresh(own, ())
        return Model(Engine(target, Bytes(), config=own, pairing=pairing))

    def _load(self, backend: Backend) -> DecoderWeights:
        if self._weights is None:
            self._weights = _draw(self._arch, backend)
        elif hasattr(backend, "adopt"):  # counts what another one of its kind has packed
            for weight in _matrices(self._weights):
                backend.adopt(weight)
        return self._weights


def _draw(arch: Arch, backend: Backend) -> DecoderWeights:
    rng = np.random.default_rng(0)
    attention, hidden = arch.uniform, arch.hidden_size

    def tensor(n: int, k: int, gain: float = 1.0) -> QuantizedTensor:
        scale = rng.uniform(0.5, 1.5, (n, k // GROUP)) * gain / (_CODE_DEVIATION * k**0.5)
        codes = np.frombuffer(rng.bytes(n * k), np.uint8).reshape(n, k) & np.uint8(15)
        halves = scale.astype(np.float16)
        return QuantizedTensor(
            bits=4, codes=codes, zero=0, scale=halves, bias=-np.float16(_MIDDLE_CODE) * halves
        )

    qkv = tensor(attention.q_size + 2 * attention.kv_size, hidden)
    attn_out = tensor(hidden, attention.q_size)
    gate_up = tensor(2 * arch.ffn_size, hidden)
    down = tensor(hidden, arch.ffn_size)
    norm = backend.vector(DenseTensor(values=np.ones(hidden, np.float32), dtype="f32"))
    layers = tuple(
        LayerWeights(
            attn_norm=norm,
            qkv=backend.matrix([qkv]),
            attn_out=backend.matrix([attn_out]),
            ffn_norm=norm,
            gate_up=backend.matrix([gate_up]),
            down=backend.matrix([down]),
        )
        for _ in range(arch.num_layers)
    )
    embedding = backend.matrix([tensor(arch.vocab_size, hidden, _SHARP)])
    output = embedding
    if not arch.tied_embedding:
        output = backend.matrix([tensor(arch.vocab_size, hidden, _SHARP)])
    return DecoderWeights(embedding=embedding, layers=layers, norm=norm, output=output)


def _matrices(weights: DecoderWeights) -> list[Any]:
    """Return every matrix once."""
    found = [
        matrix
        for layer in weights.layers
        for matrix in (layer.qkv, layer.attn_out, layer.gate_up, layer.down)
    ]
    found.append(weights.embedding)
    return found if weights.output is weights.embedding else [*found, weights.output]
