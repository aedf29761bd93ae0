"""Build `tokenizers` backends from a vocabulary alone: byte-level BPE and SentencePiece-like BPE.

Unigram, WordPiece and byte-level vocabularies with other pre-tokenisations are left out.
"""

from collections.abc import Callable, Sequence

import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

# llama.cpp's LLAMA_TOKEN_TYPE_*.
UNKNOWN_TOKEN, CONTROL_TOKEN, USER_DEFINED_TOKEN, BYTE_TOKEN = 2, 3, 4, 6
SPACE = "\u2581"  # how SentencePiece writes a space inside of its tokens

# The pattern of the GPT-4 family: Llama 3 keeps up to three digits together, Qwen takes each alone.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{DIGITS}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _by_words(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(WORDS.replace("{DIGITS}", digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# By GGUF's `tokenizer.ggml.pre`. "default" is missing on purpose: it says that the converter did not know.
PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "llama-bpe": lambda: _by_words("{1,3}"),
    "llama-v3": lambda: _by_words("{1,3}"),
    "llama3": lambda: _by_words("{1,3}"),
    "qwen2": lambda: _by_words(""),
    "smollm": _smollm,
}
LLAMA3 = ("llama-bpe", "llama-v3", "llama3")


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Sequence[str],
    special_tokens: Sequence[str],
    pre_tokenizer: str = "smollm",
    added_tokens: Sequence[str] = (),
) -> tokenizers.Tokenizer:
    """A GPT-2 style backend from GGUF's lists.

    Args:
      tokens: the text of each id, bytes written as GPT-2 writes them.
      merges: "a b" merges to "ab", the first line first.
      special_tokens: those of the tokens that are one id wherever they are written, and can be left out of a text.
      pre_tokenizer: how a text is cut into words before merges; one of PRE_TOKENIZERS, after a model that uses it.
      added_tokens: as special_tokens, but always part of a text ("<think>").
    Raises:
      ValueError: a token occurs twice, a merge is not between tokens and to one, or pre_tokenizer is unknown.
    """
    if pre_tokenizer not in PRE_TOKENIZERS:
        raise ValueError(f"{pre_tokenizer=} is not supported, allowed: {tuple(PRE_TOKENIZERS)}")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    # Llama 3 takes a word that is a token whole, whatever the merges say.
    backend = _bpe(tokens, pairs, ignore_merges=pre_tokenizer in LLAMA3)
    if pre_tokenizer == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre_tokenizer]()
    backend.decoder = decoders.ByteLevel()
    _add(backend, special_tokens, added_tokens)
    return backend


def sentencepiece_bpe(
    tokens: Sequence[str],
    scores: Sequence[float],
    token_types: Sequence[int],
    unknown_token: str | None = None,
    add_space_prefix: bool = False,
) -> tokenizers.Tokenizer:
    """A backend like SentencePiece's BPE: spaces are U+2581, what no token covers falls back to byte tokens "<0x0A>".

    Args:
      tokens: the text of each id.
      scores: of each token; between two merges the one with the higher score is made first.
      token_types: llama.cpp's kind of each token; control tokens become special tokens, user-defined ones added tokens.
      unknown_token: stands for bytes that have no byte token.
      add_space_prefix: put a space before a text (Llama 2 does, Gemma does not).
    Raises:
      ValueError: the lists differ in length, or a token occurs twice.
    """
    if not len(tokens) == len(scores) == len(token_types):
        raise ValueError(f"{len(tokens)} tokens have {len(scores)} scores and {len(token_types)} types")
    # GGUF holds the user-defined runs of spaces as they are read, all other tokens as SentencePiece writes them.
    pieces = [
        token.replace(" ", SPACE) if kind == USER_DEFINED_TOKEN else token
        for token, kind in zip(tokens, token_types, strict=True)
    ]
    merges = _merges(pieces, scores, token_types)
    backend = _bpe(pieces, merges, unk_token=unknown_token, fuse_unk=True, byte_fallback=True)
    to_space = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space_prefix:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), to_space])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = to_space
    backend.decoder = decoders.Sequence(steps)
    kinds: dict[int, list[str]] = {kind: [] for kind in (CONTROL_TOKEN, UNKNOWN_TOKEN, USER_DEFINED_TOKEN)}
    for piece, kind in zip(pieces, token_types, strict=True):
        if kind in kinds:
            kinds[kind].append(piece)
    _add(backend, kinds[CONTROL_TOKEN] + kinds[UNKNOWN_TOKEN], kinds[USER_DEFINED_TOKEN])
    return backend


def add_around(backend: tokenizers.Tokenizer, bos_token: str | None, eos_token: str | None = None) -> None:
    """Make the backend put these tokens, where not None, before and after texts encoded with special tokens."""
    single = [token for token in (bos_token, "$A", eos_token) if token is not None]
    second = [f"{token}:1" for token in (bos_token, "$B", eos_token) if token is not None]
    named = [(token, backend.token_to_id(token)) for token in (bos_token, eos_token) if token is not None]
    template = processors.TemplateProcessing(single=single, pair=single + second, special_tokens=named)
    backend.post_processor = template


def byte_tokens(backend: tokenizers.Tokenizer) -> dict[int, int]:
    """The byte each id stands for, where the backend decodes "<0xC3>" "<0xA9>" to one character; else {}."""
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    pair = [token_id for token_id in (ids[byte] for byte in "é".encode()) if token_id is not None]
    if backend.decode(pair) != "é":
        return {}
    return {token_id: byte for byte, token_id in enumerate(ids) if token_id is not None}


def byte_letters(backend: tokenizers.Tokenizer) -> dict[str, int]:
    """The byte that each letter of a token stands for, where the backend decodes "Ã" "©" to one character; else {}.

    Source: GPT-2, encoder.py: bytes that can be printed stand for themselves, the others for U+0100 and on.
    """
    pair = [token_id for token_id in map(backend.token_to_id, "Ã©") if token_id is not None]
    if backend.decode(pair) != "é":
        return {}
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printed))
    return {chr(byte): byte for byte in printed} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _bpe(tokens: Sequence[str], merges: Sequence[tuple[str, str]], **options: object) -> tokenizers.Tokenizer:
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) < len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise ValueError(f"token {twice!r} occurs more than once in the vocabulary")
    for left, right in merges:  # the Rust side would panic
        if not (left in vocabulary and right in vocabulary and left + right in vocabulary):
            raise ValueError(f"merge {left!r} + {right!r} is not between tokens, to a token")
    return tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges, **options))


def _merges(pieces: Sequence[str], scores: Sequence[float], token_types: Sequence[int]) -> list[tuple[str, str]]:
    # SentencePiece stores no merges: any two tokens that make a third may merge, at the third one's score. Tokens that
    # were never learned (runs of spaces) come first, and of equal scores the longer left part: so runs grow greedily.
    known = set(pieces)
    found = []
    for piece, score, kind in zip(pieces, scores, token_types, strict=True):
        if kind == BYTE_TOKEN:
            continue
        rank = float("inf") if kind in (CONTROL_TOKEN, USER_DEFINED_TOKEN) else score
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in known and right in known:
                found.append(((rank, cut, len(right)), left, right))
    found.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in found]


def _add(backend: tokenizers.Tokenizer, special_tokens: Sequence[str], added_tokens: Sequence[str]) -> None:
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special_tokens])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in added_tokens])
