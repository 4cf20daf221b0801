"""Engine settings: precedence, and errors that name the nearest and the allowed."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from slipstream.config import OTHER_VARIABLES, EngineConfig, ServerConfig, parse_k
from slipstream.engine.load import choose_backend
from slipstream.engine.round import padding_multiple
from slipstream.errors import ConfigError, LoadError
from slipstream.types import MAX_K


@pytest.mark.parametrize("name", ["api_key", "host", "served_model_name"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_text_is_no_setting(name: str, value: str) -> None:
    """`--api-key "$UNSET"` must not serve without a key."""
    with pytest.raises(ConfigError, match=f"{name} must not be empty"):
        ServerConfig.from_env({}, **{name: value})
    with pytest.raises(ConfigError, match=f"{name} must not be empty"):
        ServerConfig.from_env({f"SLIPSTREAM_{name.upper()}": value})


@pytest.mark.parametrize("value", [" ", "a b", "k\n", "schlüssel", 5])
def test_a_key_that_no_header_can_carry_is_refused_without_repeating_it(value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key=value)  # type: ignore[arg-type]
    assert caught.value.message == (
        "api_key must be printable ASCII text without spaces, got something else"
    )
    assert ServerConfig(api_key="").api_key == ""


def test_default_is_used_when_nothing_is_given() -> None:
    assert EngineConfig.from_env({}) == EngineConfig()


def test_variable_goes_before_default() -> None:
    config = EngineConfig.from_env({"SLIPSTREAM_THREADS": "3", "SLIPSTREAM_K": "4"})
    assert (config.threads, config.k) == (3, 4)


def test_argument_goes_before_variable() -> None:
    assert EngineConfig.from_env({"SLIPSTREAM_THREADS": "3"}, threads="2").threads == 2


def test_argument_of_none_lets_the_variable_speak() -> None:
    assert EngineConfig.from_env({"SLIPSTREAM_K": "off"}, k=None).k == "off"


def test_bad_variable_is_overridden_by_an_argument() -> None:
    assert EngineConfig.from_env({"SLIPSTREAM_K": "99"}, k="2").k == 2


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(EngineConfig)])
def test_every_field_reads_its_own_variable_back(name: str) -> None:
    default = getattr(EngineConfig(), name)
    config = EngineConfig.from_env({f"SLIPSTREAM_{name.upper()}": str(default)})
    assert getattr(config, name) == default
    assert type(getattr(config, name)) is type(default)


def test_a_k_above_max_k_contradicts_it() -> None:
    with pytest.raises(ConfigError, match=r"k must be in \[0, max_k\], got 4 with max_k 3"):
        EngineConfig(k=4, max_k=3)
    assert EngineConfig(k=3, max_k=3).k_ceiling == 3
    assert EngineConfig(k="auto", max_k=3).k_ceiling == 3
    assert EngineConfig(k="off", max_k=3).k_ceiling == 0


def test_each_config_reads_its_own_variables_and_lets_the_others_be() -> None:
    variables = {"SLIPSTREAM_PORT": "81", "SLIPSTREAM_THREADS": "2", "SLIPSTREAM_API_KEY": "k"}
    assert ServerConfig.from_env(variables).port == 81
    assert ServerConfig.from_env(variables, port="82").port == 82
    assert ServerConfig.from_env(variables).api_key == "k"
    assert EngineConfig.from_env(variables).threads == 2
    with pytest.raises(ConfigError, match="unknown variable SLIPSTREAM_PROT") as caught:
        EngineConfig.from_env({"SLIPSTREAM_PROT": "81"})
    assert caught.value.hint == "did you mean SLIPSTREAM_PORT?"


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", 65536), ("port", "x"), ("host", "a\nb"), ("api_key", "\u00e9"), ("max_queue", -1)],
)
def test_a_bad_server_setting_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerConfig(**{name: value})  # type: ignore[arg-type]


def test_unknown_variable_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown variable SLIPSTREAM_THREDS") as caught:
        EngineConfig.from_env({"SLIPSTREAM_THREDS": "2"})
    assert caught.value.hint == "did you mean SLIPSTREAM_THREADS?"


def test_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown setting thread") as caught:
        EngineConfig.from_env({}, thread=2)
    assert caught.value.hint == "did you mean threads?"


def test_variables_of_others_are_ignored() -> None:
    environ = dict.fromkeys(OTHER_VARIABLES, "anything") | {"PATH": "/bin", "SLIP": "1"}
    assert EngineConfig.from_env(environ) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", "16"),
        ("k", "-1"),
        ("k", "1.5"),
        ("k", ""),
        ("k", True),
        ("k", "Auto"),
        ("threads", "-1"),
        ("threads", "two"),
        ("threads", 257),
        ("prefill_chunk", 2**31),
        ("k", "1_0"),
        ("k", "3 "),
        ("k", "٣"),
        ("threads", ""),
        ("prefill_chunk", "0"),
        ("tile_m", 0),
        ("memory_fraction", "0"),
        ("memory_fraction", "1.01"),
        ("memory_fraction", "nan"),
        ("memory_fraction", "1e-1"),
        ("memory_fraction", True),
        ("drafter", "ngrams"),
        ("device", "tpu"),
        ("isa", ""),
        ("verify_pad", "0"),
        ("verify_pad", "257"),
        ("verify_kernel", "fast"),
    ],
)
def test_bad_value_is_refused_with_name_and_value(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_env({}, **{name: value})
    assert name in caught.value.message
    assert caught.value.message.endswith(f"got {value}")


@pytest.mark.parametrize("value", ["auto", "off", 0, MAX_K, "0", str(MAX_K)])
def test_good_k_is_taken(value: object) -> None:
    assert str(parse_k(value)) == str(value)


def test_a_variable_in_lower_case_is_unknown() -> None:
    with pytest.raises(ConfigError, match="unknown variable SLIPSTREAM_threads"):
        EngineConfig.from_env({"SLIPSTREAM_threads": "2"})


def test_a_tile_pads_to_its_rows_and_to_what_padding_asks_for() -> None:
    def multiple(**settings: object) -> int:
        return padding_multiple(EngineConfig(**settings))  # type: ignore[arg-type]

    assert multiple(tile_m=32) == 1
    assert multiple(verify_kernel="tile", tile_m=32) == 32
    assert multiple(verify_kernel="tile", tile_m=32, verify_pad="6") == 96
    assert multiple(verify_kernel="multirow", verify_pad="6") == 6


def test_the_cpu_asked_for_by_name_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "slipstream.kernels.cpu", None)
    with pytest.raises(LoadError, match="compiled cpu kernels are missing"):
        choose_backend(EngineConfig(device="cpu"))


@pytest.mark.parametrize(("value", "share"), [("0.5", 0.5), (".9", 0.9), (1, 1.0), ("1", 1.0)])
def test_a_share_may_be_written_in_several_ways(value: object, share: float) -> None:
    config = EngineConfig(memory_fraction=value)  # type: ignore[arg-type]
    assert config.memory_fraction == share
    assert type(config.memory_fraction) is float


def test_cuda_asked_for_by_name_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="the cuda back end needs torch")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(LoadError, match="no CUDA device"):
        choose_backend(EngineConfig(device="cuda"))


def test_a_gpu_that_cannot_serve_leaves_auto_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("torch", reason="the cuda back end needs torch")
    monkeypatch.setattr("slipstream.engine.load.has_device", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_backend(EngineConfig()).name in ("cpu", "reference")
    assert "the GPU is not used: there is no CUDA device" in caplog.text


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig().k = 3  # type: ignore[misc]
