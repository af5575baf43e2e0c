"""CosyVoice's text ids are transformers' and the published ones, and prompts are the published sequences of ids."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Tokenizer

from tests.models.tiny_cosyvoice import MERGES, OWN_TOKENS, write_tokenizer
from vivavoce.errors import CheckpointError, InputError
from vivavoce.models.cosyvoice.folder import ADDED, load_tokenizer
from vivavoce.models.cosyvoice.lm import (
    SPEECH_CODES,
    TEXT_TOKENS,
    CosyVoiceLM,
    CosyVoiceLMConfig,
    CosyVoicePrompt,
    Interleave,
    PromptPrefix,
)

CONFIGS = {2: CosyVoiceLMConfig.cosyvoice2(), 3: CosyVoiceLMConfig.cosyvoice3()}
QWEN_TOKENS = 151_643
# "You are a helpful assistant." in bytes, of which "he" is one token here
SYSTEM = [89, 111, 117, 32, 97, 114, 101, 32, 97, 32, 256, 108, 112, 102, 117, 108]
SYSTEM += [32, 97, 115, 115, 105, 115, 116, 97, 110, 116, 46]
END_OF_PROMPT, MARK = 151_646, 151_936
HELLO_WORLD = [259, 262, 108, 100]  # "hello", " wor", "l", "d"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Bytes and a few merges, behind which stand as many unused ids as the published vocabulary has."""
    folder = tmp_path_factory.mktemp("cosyvoice")
    write_tokenizer(folder / "CosyVoice-BlankEN", filled_to=QWEN_TOKENS)
    return folder


@pytest.fixture(scope="module", params=[2, 3])
def prompt(request, folder):
    with torch.device("meta"):
        lm = CosyVoiceLM(CONFIGS[request.param])
    return CosyVoicePrompt(lm, load_tokenizer(folder, request.param))


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder / "CosyVoice-BlankEN")
    vocabulary = json.loads((folder / "CosyVoice-BlankEN" / "vocab.json").read_text())
    theirs = Qwen2Tokenizer(vocab=vocabulary, merges=[tuple(merge.split()) for merge in MERGES])
    theirs.add_tokens([*OWN_TOKENS, *ADDED[3]], special_tokens=True)
    return load_tokenizer(folder, 3), theirs


class TestTokens:
    def test_added_tokens_have_the_published_ids(self, folder):
        second, third = (load_tokenizer(folder, version) for version in (2, 3))
        assert len(ADDED[2]) == 17
        assert len(ADDED[3]) == 278
        for tokenizer in (second, third):
            ids = {"<|im_end|>": 151645, "<|endofprompt|>": 151646, "[laughter]": 151651, "[mn]": 151662}
            assert {token: tokenizer.id_of(token) for token in ids} == ids
        ids = {"<|endofsystem|>": 151663, "[AA]": 151664, "[ZH]": 151747, "[a]": 151748, "[j]": 151797}
        ids |= {"[uang]": 151812, "[zh]": 151849, "[ǐ]": 151913, "[ǜ]": 151923}
        assert {token: third.id_of(token) for token in ids} == ids
        assert [second.id_of(token) for token in ids] == [None] * len(ids)

    def test_inline_tokens_are_one_id_each_and_text_around_them_is_text(self, folder):
        ids = load_tokenizer(folder, 3).encode("hello[laughter] world[j][ǐ]!")
        assert ids == [259, 151651, *HELLO_WORLD[1:], 151797, 151913, 33]
        assert 151797 not in load_tokenizer(folder, 2).encode("[j]")

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.one_of(st.text(max_size=8), st.sampled_from(["[breath]", "[AH0]", "[ǎng]", "hello", " world", "你好"])),
            max_size=6,
        ).map("".join)
    )
    def test_ids_are_those_of_transformers(self, pair, text):
        ours, theirs = pair
        assert ours.encode(text) == theirs(text, add_special_tokens=False)["input_ids"]

    def test_a_folder_without_a_tokenizer_is_refused(self, folder, tmp_path):
        with pytest.raises(CheckpointError, match=r"lacks vocab\.json, merges\.txt, tokenizer_config\.json"):
            load_tokenizer(tmp_path, 3)
        write_tokenizer(tmp_path / "CosyVoice-BlankEN")
        (tmp_path / "CosyVoice-BlankEN" / "vocab.json").write_text("[]")
        with pytest.raises(CheckpointError, match="does not have Qwen2's tokenizer"):
            load_tokenizer(tmp_path, 3)


def rows_of(version, text, codes):
    """The published sequence: start, text, task, codes."""
    start, task = ((MARK + 1, 0), (MARK + 2, 0)) if version == 2 else ((MARK, 6561), (MARK, 6563))
    return [start, *((token, 0) for token in text), task, *((MARK, code) for code in codes)]


class TestPrompts:
    def test_zero_shot(self, prompt):
        codes = list(range(12))
        rows = prompt.rows(prompt.zero_shot("hello world", codes), prompt.text("Hi"))
        opening = [] if prompt.version == 2 else [*SYSTEM, END_OF_PROMPT]
        assert rows == rows_of(prompt.version, [*opening, *HELLO_WORLD, 72, 105], codes)

    def test_cross_lingual_leaves_words_and_codes_out(self, prompt):
        rows = prompt.rows(prompt.cross_lingual(), prompt.text("Hi"))
        opening = [] if prompt.version == 2 else [*SYSTEM, END_OF_PROMPT]
        assert rows == rows_of(prompt.version, [*opening, 72, 105], [])

    def test_an_instruction_stands_before_the_end_of_the_prompt(self, prompt):
        rows = prompt.rows(prompt.instructed("hello"), prompt.text("Hi"))
        opening = [259] if prompt.version == 2 else [*SYSTEM, 32, 259]
        assert rows == rows_of(prompt.version, [*opening, END_OF_PROMPT, 72, 105], [])

    @pytest.mark.parametrize(("codes", "says"), [(7, "too short"), (81, "too long")])
    def test_words_that_cannot_be_the_references_are_refused(self, prompt, codes, says):
        with pytest.raises(InputError, match=says):
            prompt.zero_shot("hello world", [1] * codes)

    def test_a_reference_without_words_and_an_empty_instruction_are_refused(self, prompt):
        with pytest.raises(InputError, match="transcript of the reference is empty"):
            prompt.zero_shot("", [1] * 10)
        for bad in ("  ", "hello<|endofprompt|>"):
            with pytest.raises(InputError, match="an instruction is a sentence"):
                prompt.instructed(bad)


def plain_sequence(version, before, text, made):
    """Rounds of five and fifteen, then what is left of the text, the task, and what is left of the speech."""
    config = CONFIGS[version]
    written, spoken = list(before.text), [*before.codes, *made]
    sequence = [config.start]
    if version == 3:
        opening = written.index(END_OF_PROMPT) + 1
        sequence += [(token, 0) for token in written[:opening]]
        written = written[opening:]
    written += text
    while len(written) >= TEXT_TOKENS:
        sequence += [(token, 0) for token in written[:TEXT_TOKENS]]
        sequence += [(config.speech_mark, code) for code in spoken[:SPEECH_CODES]]
        written, spoken = written[TEXT_TOKENS:], spoken[SPEECH_CODES:]
    return [*sequence, *((token, 0) for token in written), config.task, *((config.speech_mark, c) for c in spoken)]


class TestInterleave:
    @settings(max_examples=60, deadline=None)
    @given(
        st.sampled_from([2, 3]),
        st.integers(0, 12),
        st.integers(0, 50),
        st.lists(st.integers(1, 7), min_size=1, max_size=6),
        st.integers(0, 40),
    )
    def test_what_is_read_does_not_depend_on_how_the_text_comes(self, version, transcript, codes, sizes, last):
        before = PromptPrefix((9, END_OF_PROMPT, *range(100, 100 + transcript)), tuple(range(codes)))
        if version == 2:
            before = PromptPrefix(before.text[2:], before.codes)
        text = list(range(200, 200 + sum(sizes)))
        rounds, sequence, made = Interleave(CONFIGS[version], before), [], []

        def ask_for_all_there_is():
            while (ask := rounds.next_request()) is not None:
                assert ask.codes is None or 1 <= ask.codes <= SPEECH_CODES
                new = list(range(1000 + len(made), 1000 + len(made) + (last if ask.codes is None else ask.codes)))
                made.extend(new)
                sequence.extend([*ask.rows, *((CONFIGS[version].speech_mark, code) for code in new)])

        given = iter(text)
        for size in sizes:
            rounds.add_text([next(given) for _ in range(size)])
            ask_for_all_there_is()
        rounds.end()
        ask_for_all_there_is()
        assert sequence == plain_sequence(version, before, text, made)

    def test_speech_begins_after_five_tokens(self):
        rounds = Interleave(CONFIGS[3], PromptPrefix((END_OF_PROMPT,)))
        rounds.add_text([1, 2, 3, 4])
        assert rounds.next_request() is None
        rounds.add_text([5])
        assert rounds.next_request().codes == SPEECH_CODES

    def test_text_that_is_none_is_refused(self):
        rounds = Interleave(CONFIGS[3], PromptPrefix((END_OF_PROMPT,)))
        with pytest.raises(InputError, match="no text to say"):
            rounds.end()
        with pytest.raises(InputError, match="text ids go from"):
            rounds.add_text([151_936])
        rounds.add_text([4])
        rounds.end()
        with pytest.raises(InputError, match="has ended"):
            rounds.add_text([4])
