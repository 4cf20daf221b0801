"""How byte-level vocabularies cut a text into words before merging, by the names GGUF gives them.

Merging never crosses a cut, so another rule gives other ids, plausible ones: a name that is not
here is refused rather than guessed at. Rules are regular expressions applied in turn, each to what
the one before left whole; what an expression does not match stays as a piece of its own.

Source: the expressions by which llama.cpp knows these names (`llama-vocab.cpp`). Where they differ
from a model's own `tokenizer.json`, as those of "tekken" and "gpt-4o" do for letters beyond ASCII,
they are followed all the same, so that a file has one meaning.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")

# Contractions in either case, spelled out: case folding would let "ſ" pass for "s".
_ENGLISH = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"(?:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_LINES}"
_QWEN2 = rf"(?:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_LINES}"
_QWEN35 = (
    rf"(?:{_ENGLISH})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# A word is capitals, then small letters; a letter beyond ASCII counts as either.
_NOT_SMALL, _NOT_CAPITAL = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"{_LEAD}{_NOT_SMALL}*{_NOT_CAPITAL}+|{_LEAD}{_NOT_SMALL}+{_NOT_CAPITAL}*|\p{{N}}|{_SLASHES}"
)
_GPT4O = (
    rf"{_LEAD}{_NOT_SMALL}*{_NOT_CAPITAL}+(?:{_ENGLISH})?"
    rf"|{_LEAD}{_NOT_SMALL}+{_NOT_CAPITAL}*(?:{_ENGLISH})?|\p{{N}}{{1,3}}|{_SLASHES}"
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One way to cut.

    Attributes:
        expressions: applied in turn; () for the library's own GPT-2 rule.
        single_digits: digits are cut apart before that.
        ignore_merges: a word that is a token as a whole is that token, whatever merging would give.
        adds_bos: the default of `add_bos_token`.
    """

    expressions: tuple[str, ...] = ()
    single_digits: bool = False
    ignore_merges: bool = False
    adds_bos: bool = False

    def build(self) -> PreTokenizer:
        """Return the library's object, which also spells bytes in GPT-2's way."""
        if not self.expressions:
            words = ByteLevel(add_prefix_space=False, use_regex=True)
            return (
                Sequence([Digits(individual_digits=True), words]) if self.single_digits else words
            )
        cuts = [Split(Regex(item), behavior="isolated") for item in self.expressions]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3_RULE = Rule(expressions=(_LLAMA3,), ignore_merges=True, adds_bos=True)
_RULES = {
    ("default",): Rule(expressions=_DEFAULT),
    ("gpt-2", "phi-2", "mpt", "olmo"): Rule(),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"): Rule(single_digits=True),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"): _LLAMA3_RULE,
    ("dbrx", "smaug-bpe"): Rule(expressions=(_LLAMA3,)),
    ("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan"): Rule(expressions=(_QWEN2,)),
    ("qwen35",): Rule(expressions=(_QWEN35,)),
    ("tekken",): Rule(expressions=(_TEKKEN,), ignore_merges=True, adds_bos=True),
    ("gpt-4o", "llama4"): Rule(expressions=(_GPT4O,)),
    ("falcon",): Rule(expressions=_FALCON),
    ("deepseek-coder",): Rule(expressions=_DEEPSEEK_CODER),
    ("deepseek-v3",): Rule(expressions=_DEEPSEEK_V3),
}
PRE_TOKENIZERS = {name: rule for names, rule in _RULES.items() for name in names}
