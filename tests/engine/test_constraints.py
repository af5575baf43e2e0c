"""Masked replies: whatever the weights say, the text follows its schema."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.s2s.small_parts import small_chat
from vivavoce.device import pick
from vivavoce.engine.constraints import CallSchema, GrammarCompiler
from vivavoce.engine.engine import Engine, EngineLimits
from vivavoce.engine.sampling import Generation, Sampling
from vivavoce.engine.schema_limits import MAX_SCHEMA_BYTES
from vivavoce.errors import InputError
from vivavoce.models.llama import Llama

pytest.importorskip("llguidance")
MAX_TOKENS = 600  # of letters: the small model has no longer tokens
SAMPLINGS = [
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=1.0, top_k=20, top_p=0.9),
    Sampling(temperature=1.5, top_k=0, top_p=1.0),
]


class Masked:
    """A chat model of random weights, and the compiler for its letters."""

    def __init__(self, folder):
        self.model, self.tokenizer = Llama.load(small_chat(folder))
        size, end = self.model.vocabularies[0], self.tokenizer.id_of("<|im_end|>")
        self.compiler = GrammarCompiler(self.tokenizer.to_json(), size, end)
        self.engine = self.new_engine()

    def new_engine(self, **limits):
        return Engine(self.model, pick("cpu"), torch.float32, EngineLimits(cache_rows=4096, **limits))

    def generation(self, grammar, sampling=SAMPLINGS[1], seed=0, count=MAX_TOKENS):
        return Generation(sampling, count, seed=seed, penalise_prompt=False, grammar=grammar)

    def rows(self, text="?"):
        return self.tokenizer.rows([{"role": "user", "content": text}])

    def text(self, rows):
        return self.tokenizer.decode([row[0] for row in rows])

    def write(self, grammar, **options):
        sequence = self.engine.open(self.rows())
        written = self.engine.complete(sequence, self.generation(grammar, **options))
        self.engine.close(sequence)
        return self.text(written), self.model.ends(written[-1])


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    return Masked(tmp_path_factory.mktemp("chat"))


names = st.text("abcdefghij_", min_size=1, max_size=6)
scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-50, 50),
        st.integers(0, 900),
    ),
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(lambda values: {"enum": values}, st.lists(st.text(max_size=8), min_size=1, max_size=4, unique=True)),
    st.builds(lambda value: {"const": value}, st.one_of(st.integers(), st.text(max_size=5), st.booleans())),
    st.just({"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{2}$"}),
    st.just({"type": "string", "format": "date"}),
)


def objects(inner):
    return st.builds(
        lambda properties, required: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:required],
            "additionalProperties": False,
        },
        st.dictionaries(names, inner, max_size=3),
        st.integers(0, 3),
    )


schemas = st.recursive(
    scalars,
    lambda inner: st.one_of(
        objects(inner),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 3)),
        st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def examples(count):
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=count, deadline=None, suppress_health_check=checks)


drawn_json = given(schema=schemas, sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 99))
drawn_call = given(schema=objects(schemas), sampling=st.sampled_from(SAMPLINGS), seed=st.integers(0, 99))


def check_json(masked, schema, sampling, seed):
    text, is_complete = masked.write(masked.compiler.json(schema), sampling=sampling, seed=seed)
    assert is_complete, f"{schema} allows no endless text, and {text!r} is one"
    Draft202012Validator(schema).validate(json.loads(text))


def check_call(masked, schema, sampling, seed):
    grammar = masked.compiler.calls([CallSchema("book", schema), CallSchema("ring", {})], True, max_calls=1)
    text, is_complete = masked.write(grammar, sampling=sampling, seed=seed)
    assert is_complete and text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")
    call = json.loads(text.removeprefix("<tool_call>").removesuffix("</tool_call>"))
    assert list(call) == ["name", "arguments"]
    Draft202012Validator({"book": schema, "ring": {"maxProperties": 0}}[call["name"]]).validate(call["arguments"])


@examples(15)
@drawn_json
def test_every_reply_is_json_of_its_schema(masked, schema, sampling, seed):
    check_json(masked, schema, sampling, seed)


@examples(5)
@drawn_call
def test_every_required_call_is_one_of_the_tools(masked, schema, sampling, seed):
    check_call(masked, schema, sampling, seed)


@pytest.mark.full
@examples(500)
@drawn_json
def test_every_reply_is_json_of_its_schema_at_length(masked, schema, sampling, seed):
    check_json(masked, schema, sampling, seed)


@pytest.mark.full
@examples(150)
@drawn_call
def test_every_required_call_is_one_of_the_tools_at_length(masked, schema, sampling, seed):
    check_call(masked, schema, sampling, seed)


def follows(masked, grammar, text):
    """Whether a grammar allows a text, letter by letter, and an end after it."""
    matcher = grammar.start()
    for id in [*masked.tokenizer.encode(text), masked.tokenizer.id_of("<|im_end|>")]:
        if not (matcher.allowed()[id >> 5] >> (id & 31)) & 1:
            return False
        matcher.accept(id)
    return True


ROOM = CallSchema("book", {"type": "object", "properties": {"room": {"type": "integer"}}, "required": ["room"]})
CALL = '<tool_call>\n{"name": "book", "arguments": {"room": 3}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "is_allowed", "is_call"),
    [
        ("It is 2 < 3, dear guest.", True, False),
        (CALL, True, True),
        (f"{CALL}\n{CALL}", True, False),
        (f"One moment.\n{CALL}", True, False),
        (CALL.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), True, False),
        (CALL.replace("3", '"three"'), False, False),
        (CALL.replace("book", "cook"), False, False),
        ("<tool_call>I think so</tool_call>", False, False),
        ("{ well", False, False),
        ("```json\n{}", False, False),
        (CALL.replace("tool_call", "tools"), False, False),
        (f"One moment.\n{CALL.replace('tool_call', 'tools')}", False, False),
        ("<b>Sure.</b>", False, False),
        ("", False, False),
    ],
)
def test_words_are_free_and_calls_are_not(masked, text, is_allowed, is_call):
    assert follows(masked, masked.compiler.calls([ROOM]), text) == is_allowed
    assert follows(masked, masked.compiler.calls([ROOM], True, max_calls=1), text) == is_call


def nested(levels):
    schema = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ({"enum": [f"room {number}" for number in range(MAX_SCHEMA_BYTES // 8)]}, "the limit is"),
        (nested(2000), "levels deep"),
        ({"$ref": "#"}, "cannot go on"),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}]}, "cannot go on"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "Unsatisfiable"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable"),
        ({"properties": {}, "required": ["a"], "additionalProperties": False, "type": "object"}, "Unsatisfiable"),
        ({"$ref": "http://192.0.2.1/schema.json"}, "cannot be followed"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "text"}, "Invalid type"),
        ({"type": "string", "pattern": "(?=a)b"}, "cannot be followed"),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_by_name(masked, schema, complaint):
    with pytest.raises(InputError, match=complaint):
        masked.compiler.json(schema)
    if "uniqueItems" not in schema:
        with pytest.raises(InputError):
            masked.compiler.calls([CallSchema("book", schema)])


def test_a_recursive_schema_and_an_endless_one_are_bounded_by_the_reply(masked):
    tree = {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False}
    text, is_complete = masked.write(masked.compiler.json(tree), count=200)
    assert not is_complete or isinstance(json.loads(text), dict)
    text, is_complete = masked.write(masked.compiler.json({"type": "array", "minItems": 10**7}), count=50)
    assert not is_complete and text.startswith("[")


def test_masked_and_free_replies_of_one_batch_are_those_of_each_alone(masked):
    """Also where slots are few, so that a free reply gets the slot of a masked one."""
    grammar = masked.compiler.json({"type": "array", "items": {"type": "integer"}, "maxItems": 9})
    generations = [masked.generation(each, seed=n, count=40) for n, each in enumerate([grammar, None] * 3)]
    prompts = [masked.rows(f"question {number}") for number in range(len(generations))]
    alone = []
    for rows, generation in zip(prompts, generations, strict=True):
        engine = masked.new_engine()
        alone.append(engine.complete(engine.open(rows), generation))
    engine = masked.new_engine(sequences_per_step=2)
    sequences = [engine.open(rows) for rows in prompts]
    for sequence, generation in zip(sequences, generations, strict=True):
        engine.generate(sequence, generation)
    made = {sequence.id: [] for sequence in sequences}
    while any(sequence.is_generating for sequence in sequences):
        for emission in engine.step():
            made[emission.sequence.id].append(emission.row)
    assert list(made.values()) == alone


def test_a_grammar_that_fails_ends_its_own_reply_only(masked):
    class Broken:
        def start(self):
            return self

        def allowed(self):
            raise InputError("no text follows")

    engine = masked.new_engine()
    broken, healthy = engine.open(masked.rows()), engine.open(masked.rows())
    engine.generate(broken, masked.generation(Broken(), count=5))
    engine.generate(healthy, masked.generation(None, count=5))
    result = engine.advance()
    while healthy.is_generating:
        assert [failure.sequence for failure in result.failures] in ([broken], [])
        result = engine.advance()
    assert healthy.generated == 5 and broken.generated == 0 and not broken.is_generating


@pytest.mark.gpu
def test_cuda_graphs_read_the_masks(masked, tmp_path):
    """Masked and free replies share the captured steps; each is what it is alone, and the masked ones are valid."""
    device = pick("cuda")
    model, _ = Llama.load(small_chat(tmp_path), device.torch_device, torch.float32)
    grammar = masked.compiler.json({"type": "array", "items": {"type": "integer"}, "maxItems": 9})
    generations = [masked.generation(each, seed=n, count=60) for n, each in enumerate([grammar, None] * 3)]
    rows = masked.rows()

    def replies(count):
        engine = Engine(model, device, torch.float32, EngineLimits(cache_rows=4096))
        made = []
        for start in range(0, len(generations), count):
            sequences = [engine.open(rows) for _ in generations[start : start + count]]
            for sequence, generation in zip(sequences, generations[start:], strict=False):
                engine.generate(sequence, generation)
            while any(sequence.is_generating for sequence in sequences):
                engine.step()
            made += [sequence.rows[len(rows) :] for sequence in sequences]
        return made

    together = replies(len(generations))
    assert together == replies(1)
    for reply in together[::2]:
        assert all(isinstance(number, int) for number in json.loads(masked.text(reply)))


def test_a_bias_makes_an_allowed_id_likelier_and_never_an_excluded_one(masked):
    grammar = masked.compiler.json({"enum": ["a", "b"]})
    letters = {letter: masked.tokenizer.encode(letter)[0] for letter in "abc"}
    for letter in "ab":
        biases = ((letters[letter], 1000.0), (letters["c"], 2000.0))
        sequence = masked.engine.open(masked.rows())
        generation = replace(masked.generation(grammar, SAMPLINGS[1]), biases=biases)
        assert json.loads(masked.text(masked.engine.complete(sequence, generation))) == letter
        masked.engine.close(sequence)
    with pytest.raises(InputError, match="with a grammar"):
        Generation(biases=((1, 1.0),))
    with pytest.raises(InputError, match="the limit is 4"):
        Generation(grammar=grammar, biases=((1, 1.0),) * 5)
