"""Random weights in the bench: exact over kernels and widths, refused where text would matter."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="the reference back end needs torch")

from slipstream.bench import synthetic
from slipstream.bench.arms import Variant, parse_variants
from slipstream.bench.benchmark import Plan, Result, benchmark
from slipstream.bench.synthetic import Synthetic
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError
from tests.bench.worlds import conversation, limits, never, workload

TINY = synthetic.shape(
    num_layers=2,
    hidden_size=128,
    ffn_size=128,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    vocab_size=320,
    context_len=512,
    tied_embedding=False,
)
CONFIG = EngineConfig(device="reference", max_num_seqs=1, max_model_len=128)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(synthetic.SHAPES, "tiny", TINY)


def run(**changes: Any) -> Result:
    values: dict[str, Any] = {
        "model": "random:tiny",
        "config": CONFIG,
        "k_values": [0, 2],
        "variants": [Variant(), Variant(verify_pad="4")],
        "workload": workload(conversation(1), conversation(2)),
        "limits": limits(max_tokens=8),
        "drafter": "scripted:0.5",
        "allow_misleading": True,
    }
    return benchmark(Plan(**(values | changes)), never, lambda line: None)


def test_a_run_has_every_variant_and_equal_outputs() -> None:
    result = run()
    assert not result.run.mismatches
    assert {row.variant for row in result.rows} == {"auto, pad auto", "auto, pad 4"}
    assert any("acceptance is scripted" in note for note in result.run.notes)
    assert result.as_json()["provenance"]["model"] == "random:tiny"


def test_models_of_one_shape_share_their_weights() -> None:
    made = Synthetic("random:tiny")
    first = made.model(CONFIG, verify_pad="off")
    second = made.model(CONFIG, verify_pad="4")
    assert made._weights is not None
    assert first.target.kv is not second.target.kv
    assert first.ids("ab") == second.ids("ab") == [97, 98]


def test_unknown_shapes_real_drafters_and_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="the shapes 8b, 12b, tiny, got '70b'"):
        run(model="random:70b")
    with pytest.raises(ConfigError, match="accept no real drafter's tokens, got --drafter auto"):
        run(drafter="auto")
    with pytest.raises(ConfigError, match="no other engine has"):
        run(peers=["llama.cpp"])


def test_a_tile_is_not_compared_with_itself_padded_to_what_it_holds() -> None:
    names = [variant.name for variant in parse_variants(CONFIG, "multirow,tile", "off,8", "16,32")]
    assert names == ["multirow, pad off", "multirow, pad 8", "tile 16, pad off", "tile 32, pad off"]
    (wider,) = parse_variants(CONFIG, "tile", "24", "16")
    assert wider.verify_pad == "24"
