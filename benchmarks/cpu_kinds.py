"""Steps of a decoder with random weights of several kinds, and the bytes a second that they read.

Weights cost what trained ones cost. All kinds are held at once and timed in turn, so that ratios
compare the same seconds; a kind's bytes a second are those of its packed weights over T(1).
"mixed" is the pair of most files with K-quants: Q6_K in v and down of every other layer and in the
output, Q4_K elsewhere. Shapes larger than the last cache measure memory; smaller ones do not.

    python benchmarks/cpu_kinds.py [--shape 135m|1b|quarter] [--trials 8] [KIND ...]

Kinds are those of `tests/quantized.py`, bf16 and mixed. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]

from provenance import provenance  # noqa: E402

from slipstream.kernels.cpu import CpuBackend  # noqa: E402
from slipstream.kernels.ops import Step  # noqa: E402
from slipstream.models.arch import (  # noqa: E402
    Arch,
    AttentionArch,
    plain_frequencies,
    score_scale,
)
from slipstream.models.decoder import DecoderWeights, LayerWeights, forward  # noqa: E402
from slipstream.models.weights import DenseTensor, Tensor  # noqa: E402
from tests.quantized import KINDS, random_matrix  # noqa: E402
from tests.tiny import make_rows  # noqa: E402

# Layers, hidden, ffn, heads, KV heads, vocabulary. "135m" has 512 columns where SmolLM2 has 576,
# which no K-quant divides; "quarter" is four of the sixteen layers of "1b".
SHAPES = {
    "135m": (30, 512, 1536, 8, 2, 49_152),
    "1b": (16, 2048, 8192, 32, 8, 128_256),
    "quarter": (4, 2048, 8192, 32, 8, 4096),
}
HEAD_DIM, MAX_LEN = 64, 512
ROWS = (1, 2, 4, 8, 16)
REPEAT = 3
DEFAULT = ("Q4_1", "Q4_K", "Q6_K", "mixed", "bf16")


@dataclass(frozen=True)
class Model:
    """A compiled decoder and what its weights take."""

    step: Step
    weight_bytes: int


def build(shape: str, kind: str) -> Model:
    """Draw and pack a decoder."""
    layers, hidden, ffn, heads, kv_heads, vocab = SHAPES[shape]
    attention = AttentionArch(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        frequencies=plain_frequencies(HEAD_DIM, 1e4),
        rope_interleaved=True,
        scale=score_scale(HEAD_DIM),
    )
    arch = Arch(
        family="random",
        num_layers=layers,
        hidden_size=hidden,
        ffn_size=ffn,
        vocab_size=vocab,
        context_len=MAX_LEN,
        norm_eps=1e-5,
        tied_embedding=True,
        attention=(attention,) * layers,
        kv_layers=tuple(range(layers)),
    )
    backend = CpuBackend()
    drawn: dict[tuple[int, int, str], Tensor] = {}

    def tensor(n: int, k: int, *, finer: bool = False) -> Tensor:
        own = kind if kind != "mixed" else "Q6_K" if finer else "Q4_K"
        if (n, k, own) not in drawn:
            drawn[n, k, own] = draw(n, k, own)
        return drawn[n, k, own]

    def norm() -> Any:
        return backend.vector(DenseTensor(values=np.ones(hidden, np.float32), dtype="f32"))

    def layer(index: int) -> LayerWeights:
        finer = index % 2 == 0
        kv_size = attention.kv_size
        qkv = [
            tensor(attention.q_size, hidden),
            tensor(kv_size, hidden),
            tensor(kv_size, hidden, finer=finer),
        ]
        return LayerWeights(
            attn_norm=norm(),
            qkv=backend.matrix(qkv),
            attn_out=backend.matrix([tensor(hidden, attention.q_size)]),
            ffn_norm=norm(),
            gate_up=backend.matrix([tensor(ffn, hidden)] * 2),
            down=backend.matrix([tensor(hidden, ffn, finer=finer)]),
        )

    packed = tuple(layer(index) for index in range(layers))
    embedding = backend.matrix([tensor(vocab, hidden, finer=True)])
    weights = DecoderWeights(embedding=embedding, layers=packed, norm=norm(), output=embedding)
    kv = backend.kv_cache(arch, 2, MAX_LEN)
    step = backend.compile(
        lambda ops: forward(ops, arch, weights, kv), max_rows=max(ROWS), max_logits=max(ROWS)
    )
    return Model(step=step, weight_bytes=backend.weight_bytes())


def draw(n: int, k: int, kind: str) -> Tensor:
    """Draw a matrix of one kind."""
    if kind != "bf16":
        return random_matrix(n, k, **KINDS[kind])
    values = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32) / np.float32(k**0.5)
    return DenseTensor(values=(values.view(np.uint32) >> 16).astype(np.uint16), dtype="bf16")


def main() -> int:
    """Time all kinds in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", default=DEFAULT)
    parser.add_argument("--shape", choices=SHAPES, default="quarter")
    parser.add_argument("--trials", type=int, default=8)
    args = parser.parse_args()
    known = {*KINDS, "bf16", "mixed"}
    if unknown := set(args.kinds) - known:
        parser.error(f"kinds must be among {sorted(known)}, got {sorted(unknown)}")
    models = {kind: build(args.shape, kind) for kind in args.kinds}
    seconds: dict[str, dict[int, list[float]]] = {k: {r: [] for r in ROWS} for k in models}
    for _ in range(args.trials):
        for kind, model in models.items():
            for count in ROWS:
                rows = make_rows(range(count), range(count), [[0, 1]])
                model.step(rows)
                for _ in range(REPEAT):
                    start = time.perf_counter()
                    model.step(rows)
                    seconds[kind][count].append(time.perf_counter() - start)
    medians = {k: {r: statistics.median(t) for r, t in own.items()} for k, own in seconds.items()}
    rates = {k: models[k].weight_bytes / own[1] / 1e9 for k, own in medians.items()}
    first = next(iter(rates.values()))
    print(
        f"{'kind':12}{'MB':>8}  {'GB/s':>6}  of the first  T(1) ms  " + "T(r)/T(1) of 2, 4, 8, 16"
    )
    for kind, own in medians.items():
        ratios = " ".join(f"{own[r] / own[1]:6.2f}" for r in ROWS[1:])
        print(
            f"{kind:12}{models[kind].weight_bytes / 1e6:8.1f}  {rates[kind]:6.1f}"
            f"  {rates[kind] / first:12.2f}  {own[1] * 1e3:7.2f}  {ratios}"
        )
    result = {
        "schema": "cpu_kinds/1",
        "shape": args.shape,
        "provenance": provenance(f"random:{args.shape}"),
    }
    print(json.dumps(result | {"seconds": medians, "gb_s": rates}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
