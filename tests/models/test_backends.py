import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.backends import PRE_TOKENIZERS, add_around, byte_level_bpe, byte_tokens, sentencepiece_bpe


def words(parts, pre_tokenizer, text):
    """The words a text is cut into: what no merge can join."""
    backend = byte_level_bpe(*parts, pre_tokenizer)
    return [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("pre_tokenizer", "text", "expected"),
    [
        ("smollm", "a2024 x 12", ["a", "2", "0", "2", "4", " x", " ", "1", "2"]),
        ("gpt-2", "a2024 x 12", ["a", "2024", " x", " 12"]),
        ("qwen2", "a2024 x 12", ["a", "2", "0", "2", "4", " x", " ", "1", "2"]),
        ("llama-bpe", "a2024 x 12", ["a", "202", "4", " x", " ", "12"]),
        ("llama3", "1234567", ["123", "456", "7"]),
        ("gpt-2", "it's I'LL", ["it", "'s", " I", "'", "LL"]),
        ("qwen2", "it's I'LL", ["it", "'s", " I", "'LL"]),
        ("gpt-2", "f(x)\n\n  y", ["f", "(", "x", ")", "\n\n ", " y"]),
        ("qwen2", "f(x)\n\n  y", ["f", "(x", ")\n\n", " ", " y"]),
    ],
)
def test_each_pre_tokenisation_cuts_as_its_models_were_trained(bpe_parts, pre_tokenizer, text, expected):
    assert words(bpe_parts, pre_tokenizer, text) == expected


@pytest.mark.parametrize("pre_tokenizer", PRE_TOKENIZERS)
@settings(max_examples=25, deadline=None)
@given(text=st.text())
def test_every_text_comes_back_but_for_the_composition_of_qwen(bpe_parts, pre_tokenizer, text):
    backend = byte_level_bpe(*bpe_parts, pre_tokenizer)
    expected = backend.normalizer.normalize_str(text) if pre_tokenizer == "qwen2" else text
    assert backend.decode(backend.encode(text).ids, skip_special_tokens=False) == expected


def test_qwen_composes_characters(bpe_parts):
    backend = byte_level_bpe(*bpe_parts, "qwen2")
    assert backend.encode("A\u030a").ids == backend.encode("\u00c5").ids
    assert len(backend.encode("\u00c5").ids) == 2  # its two bytes


def test_llama_takes_words_that_are_tokens_whole(bpe_parts):
    tokens, merges, special = bpe_parts
    tokens = [*tokens, "abc"]  # no merge makes it
    by_name = {name: byte_level_bpe(tokens, merges, special, name) for name in ("gpt-2", "llama-bpe")}
    pieces = {name: backend.encode("abc").tokens for name, backend in by_name.items()}
    assert pieces == {"gpt-2": ["a", "b", "c"], "llama-bpe": ["abc"]}


def test_added_tokens_stay_in_the_text(bpe_parts):
    tokens, merges, special = bpe_parts
    backend = byte_level_bpe([*tokens, "<think>"], merges, special, "qwen2", ["<think>"])
    token_ids = backend.encode("<think><|im_end|>").ids
    assert token_ids == [len(tokens), 2]
    assert backend.decode(token_ids) == "<think>"


@pytest.mark.parametrize("name", ["default", "tekken"])
def test_unknown_pre_tokenisations_list_the_known(bpe_parts, name):
    with pytest.raises(ValueError, match=f"pre_tokenizer='{name}' is not supported, allowed: .*'qwen2', 'smollm'"):
        byte_level_bpe(*bpe_parts, name)


def test_vocabularies_that_do_not_fit_are_refused(spm_parts):
    with pytest.raises(ValueError, match="token 'a' occurs more than once"):
        byte_level_bpe(["a", "b", "a"], [], [])
    with pytest.raises(ValueError, match=r"merge 'a' . 'b' is not between tokens, to a token"):
        byte_level_bpe(["a", "b"], ["a b"], [])
    with pytest.raises(ValueError, match="274 tokens have 273 scores and 274 types"):
        sentencepiece_bpe(spm_parts[0], spm_parts[1][1:], spm_parts[2])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ["hello"]),  # he, then lo (rank 3), then hello (rank 4)
        ("hel", ["hel"]),  # he before el, though el stands as well
        ("helhe", ["hel", "he"]),
        ("oel", ["o", "el"]),
        (" he he", ["▁he", "▁he"]),  # no space before the first word
        ("he   o", ["he", "▁▁▁", "o"]),
        ("he    o", ["he", "▁▁▁", "▁", "o"]),  # the longest run there is, from the left
        ("é", ["<0xC3>", "<0xA9>"]),
        ("<td>he<end_of_turn>", ["<td>", "he", "<end_of_turn>"]),
    ],
)
def test_scores_give_the_merges(spm_parts, text, expected):
    assert sentencepiece_bpe(*spm_parts, "<unk>").encode(text).tokens == expected


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.sampled_from("helo  \n\té日𒀀🎉<>")))
@pytest.mark.parametrize("add_space_prefix", [False, True])
def test_sentencepiece_texts_come_back(spm_parts, text, add_space_prefix):
    backend = sentencepiece_bpe(*spm_parts, "<unk>", add_space_prefix)
    assert backend.decode(backend.encode(text).ids) == text


def test_only_control_tokens_are_left_out_of_a_text(spm_parts):
    backend = sentencepiece_bpe(*spm_parts, "<unk>")
    token_ids = backend.encode("<bos><td>  he<end_of_turn>").ids
    assert backend.decode(token_ids) == "<td>  he"
    assert backend.decode(token_ids, skip_special_tokens=False) == "<bos><td>  he<end_of_turn>"


def test_a_space_prefix_is_one_token_with_the_word(spm_parts):
    backend = sentencepiece_bpe(*spm_parts, "<unk>", add_space_prefix=True)
    assert backend.encode("he he").tokens == ["▁he", "▁he"]
    assert backend.decode(backend.encode("he he").ids) == "he he"


def test_bos_and_eos_are_put_around_texts_and_pairs(spm_parts):
    backend = sentencepiece_bpe(*spm_parts)
    add_around(backend, "<bos>")
    assert backend.encode("he").tokens == ["<bos>", "he"]
    assert backend.encode("he", add_special_tokens=False).tokens == ["he"]
    add_around(backend, "<bos>", "<end_of_turn>")
    assert backend.encode("he", "lo").tokens == ["<bos>", "he", "<end_of_turn>", "<bos>", "lo", "<end_of_turn>"]
    add_around(backend, None)
    assert backend.encode("he").tokens == ["he"]


def test_byte_tokens_are_those_that_decode_together(spm_parts, bpe_parts):
    assert byte_tokens(sentencepiece_bpe(*spm_parts)) == {7 + byte: byte for byte in range(256)}
    assert byte_tokens(byte_level_bpe(*bpe_parts)) == {}
    assert byte_tokens(byte_level_bpe(["<0xC3>", "<0xA9>"], [], [])) == {}
