"""Record the token ids that llama.cpp gives for awkward texts: tests/data/token_ids.json.

Writes small vocabularies of each kind to GGUF files, has llama.cpp encode the texts with them, and
keeps vocabularies and ids together. SmolLM2's vocabulary is added, by ids alone, where it has been
pulled. Needs the extras `dev` and `peers`:

    python scripts/record_token_ids.py

The vocabularies are trained here, on the texts themselves and benchmarks/data/ordinary_text.txt, so
that they have merges for everything that the texts are meant to try.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
from llama_cpp import Llama, __version__
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.trainers import BpeTrainer

from slipstream.errors import LoadError
from slipstream.models.loading import resolve_model
from slipstream.models.loading.gguf import read_gguf
from slipstream.models.loading.pre_tokenizers import PRE_TOKENIZERS

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "tests" / "data" / "token_ids.json"
CORPUS = ROOT / "benchmarks" / "data" / "ordinary_text.txt"
SPACE = "▁"
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
SPECIAL_TYPES = [2, 3, 3, 3, 3]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TEXTS = [
    "",
    "Hello world",
    " leading and trailing ",
    "  two  spaces   three    four     five",
    "                                 ",
    "a\n\nb\n \n  c\n\n\n",
    "   \n   \n\t\n",
    "\ttab\t\ttabs\t \t",
    "\r\n windows\r\nline\r",
    "    def f(self, x: int) -> None:\n        return x ** 2  # note\n",
    'for (int i=0;i<10;++i){a[i]+=b[i]&0xFF;} // "x"',
    '<div class="a">&amp;</div><!-- c -->',
    "$x = \\frac{a}{b} + \\alpha^{2}$",
    "1234567890 12 123 1234 3.14 1,000,000 0x1F",
    "½ ² Ⅻ ٣٤٥ 一二三 ①② 𝟙",
    "I'll you've don't DON'T we'Re 'tis they'd it'S ''s",
    "naïve café Ångström ß ſ ŒUVRE İ ǅ",
    "iPhone XMLHttpRequest camelCase SCREAMING_CASE snake_case",
    "日本語のテキスト、漢字とかな。「引用」",
    "中文 字符，。！混合English和123",
    "한국어 텍스트 입니다",
    "مرحبا بالعالم",
    "שלום עולם",
    "हिन्दी में पाठ ไทย",
    "Ελληνικά και Русский текст",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family",
    "👍🏽 ok 🇩🇪 ☃️ 😀😀",
    "nbsp\xa0space\u3000ideographic\u2028line\u0085next",
    "\u200b\ufeff\u200d zero width",
    "e\u0301 combining n\u0303 \u0301",
    "a\x00b\x01c\x04d \x06 \x13\x1b\x7f",
    "\U00040000 plane four \ue000 private \ufffd",
    "!!!??? ... ---- ==== #### ~~~ ``` |||",
    "“quoted” ‘single’ — – … • → € £ ©",
    "aaaa aaaaaaaaa abababab",
    "▁ spelled ▁▁ space",
    "Ġ Ċ <0x0A> <0x41>",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>begin</s> <unk>",
    "<|im_start|><|im_end|><|im_",
    " <|im_end|> spaces <|im_end|>  around",
]


def main() -> int:
    """Record, and say what was recorded."""
    vocabularies = make_vocabularies()
    record: dict[str, Any] = {
        "source": f"llama-cpp-python {__version__}, vocab_only, add_bos off",
        "texts": TEXTS,
        "vocabularies": vocabularies,
        "ids": {},
    }
    cases = {name: dict(keys) for name, keys in vocabularies.items()}
    try:
        real = read_gguf(resolve_model("smollm2-135m")).metadata
    except LoadError as error:
        print(f"without smollm2-135m: {error.message}", file=sys.stderr)
    else:
        keys = {"tokens": real["tokenizer.ggml.tokens"], "merges": real["tokenizer.ggml.merges"]}
        types = [int(number) for number in real["tokenizer.ggml.token_type"]]  # type: ignore[union-attr]
        cases["smollm2-135m"] = {"model": "gpt2", "token_type": types, **keys}
    with tempfile.TemporaryDirectory() as folder:
        for name, keys in cases.items():
            for pre in one_of_each_rule() if keys["model"] == "gpt2" else [""]:
                path = Path(folder) / "vocabulary.gguf"
                write(path, keys | ({"pre": pre} if pre else {}))
                record["ids"][f"{name} {pre}".strip()] = encode(path)
    TARGET.write_text(spell(record))
    print(f"{TARGET}: {len(TEXTS)} texts, {', '.join(record['ids'])}", file=sys.stderr)
    return 0


def make_vocabularies() -> dict[str, dict[str, Any]]:
    """Train a vocabulary of each kind."""
    corpus = [CORPUS.read_text(encoding="utf-8")[:40_000], *TEXTS * 3]
    spelled, merges = train(corpus, byte_level=True, size=900)
    pieces, joins = train([text.replace(" ", SPACE) for text in corpus], byte_level=False, size=900)
    # As SentencePiece orders them: what joining made, in that order, then the characters.
    made = list(dict.fromkeys("".join(pair) for pair in joins))
    chars = [text for text in pieces if text not in set(made)]
    # llama.cpp lets merging put special tokens together; without their parts there is nothing to.
    parts = {
        half for name in SPECIAL for at in range(2, len(name)) for half in (name[:at], name[-at:])
    }
    ordered = [text for text in (*made, *chars) if text not in parts]
    common = [*SPECIAL, *BYTES]
    types = [*SPECIAL_TYPES, *[6] * 256]
    byte_level = {
        "model": "gpt2",
        "tokens": [*SPECIAL, *spelled, "<tool>"],
        "token_type": [*SPECIAL_TYPES, *[1] * len(spelled), 4],
        "merges": [" ".join(pair) for pair in merges],
    }
    sentence_piece = {
        "model": "llama",
        "tokens": [*common, *ordered, "<tool>"],
        "token_type": [*types, *[1] * len(ordered), 4],
        "scores": [0.0] * len(common) + [-float(i) for i in range(len(ordered))] + [-1000.0],
    }
    ordered = [text for text in ordered if "\n" not in text]
    lines = ["\n", "\n\n", "\n\n\n"]
    gemma4 = {
        "model": "gemma4",
        "tokens": [*common, *ordered, *lines],
        "merges": [" ".join(pair) for pair in joins if not {*pair, "".join(pair)} - {*ordered}],
    }
    gemma4["token_type"] = [*types, *[1] * (len(gemma4["tokens"]) - len(common))]
    return {
        "byte level": byte_level,
        "SentencePiece": sentence_piece,
        "SentencePiece, no prefix": sentence_piece | {"add_space_prefix": False},
        "Gemma 4": gemma4,
    }


def train(
    corpus: Sequence[str], *, byte_level: bool, size: int
) -> tuple[list[str], list[tuple[str, str]]]:
    """Return tokens and merges."""
    library = Tokenizer(BPE())
    words = ByteLevel(add_prefix_space=False) if byte_level else Split(SPACE, "merged_with_next")
    library.pre_tokenizer = words
    alphabet = ByteLevel.alphabet() if byte_level else []
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(corpus, trainer)
    block = json.loads(library.to_str())["model"]
    # What special tokens are called is no token of its own, nor part of one; llama.cpp ends a token
    # at a NUL.
    named = (*SPECIAL, *BYTES, "<tool>", "\0")
    tokens = [
        text
        for text in sorted(block["vocab"], key=block["vocab"].__getitem__)
        if not any(name in text for name in named)
    ]
    return tokens, [(left, right) for left, right in block["merges"] if left + right in tokens]


def one_of_each_rule() -> list[str]:
    """Return one name for each rule of cutting words."""
    return list({rule: name for name, rule in reversed(PRE_TOKENIZERS.items())}.values())


def write(path: Path, keys: Mapping[str, Any]) -> None:
    """Write a file that holds a vocabulary and the least that llama.cpp asks for beside it."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    for key, value in {"bos_token_id": 1, "eos_token_id": 2, **keys}.items():
        name = f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            writer.add_array(name, list(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encode(path: Path) -> dict[str, list[list[int]]]:
    """Return the ids of the texts, special tokens parsed and not."""
    model = Llama(str(path), vocab_only=True, verbose=False)
    return {
        kind: [model.tokenize(text.encode(), add_bos=False, special=parse) for text in TEXTS]
        for kind, parse in (("plain", False), ("special", True))
    }


def spell(record: Mapping[str, Any]) -> str:
    """Return JSON with one line for each list of ids and each part of a vocabulary."""

    def lines(block: Any, depth: int) -> str:
        pad = "  " * (depth + 1)
        if isinstance(block, dict):
            inner = [f"{json.dumps(key)}: {lines(item, depth + 1)}" for key, item in block.items()]
        elif isinstance(block, list) and block and isinstance(block[0], list):
            inner = [json.dumps(item) for item in block]
        else:
            return json.dumps(block, ensure_ascii=False)
        begin, end = "{}" if isinstance(block, dict) else "[]"
        return begin + "\n" + ",\n".join(pad + item for item in inner) + f"\n{pad[2:]}{end}"

    return lines(record, 0) + "\n"


if __name__ == "__main__":
    raise SystemExit(main())
