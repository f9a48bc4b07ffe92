"""Records as tokens: what is trained is what was answered, whatever the tokenizer makes of it."""

import numpy as np
import pytest
from helpers.languages import make_tokenizer

import shardlib as sl
from shardlib.errors import BatchError

TALK = [
    {"role": "user", "content": "what is two?"},
    {"role": "assistant", "content": "one and one"},
    {"role": "user", "content": "and three?"},
    {"role": "assistant", "content": "two and one"},
]
MARKED = (
    "{% for message in messages %}<s>{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}</s>"
    "{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
# Writes earlier answers otherwise, as templates do that leave out what was thought before.
FORGETFUL = (
    "{% for message in messages %}{% if loop.last or message['role'] == 'user' %}{{ message['content'] }}"
    "{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def trained(found, tokenizer):
    """The text of the tokens that are targets, without spaces: a token may begin with the one before its word."""
    texts = [tokenizer.decode(tokens[kept].tolist()) for tokens, kept in zip(found.tokens, found.trained)]
    return [text.replace(" ", "") for text in texts]


def test_an_assistants_answers_are_trained(tokenizer):
    found = sl.data.examples(
        [{"messages": TALK}, {"text": "import ast"}, {"prompt": "a = ", "completion": "b"}], tokenizer
    )
    assert trained(found, tokenizer) == ["oneandone</s>twoandone</s>", "importast</s>", "b</s>"]
    assert tokenizer.decode(found.tokens[0].tolist()).startswith("<s>user: what is two?</s><s>assistant: one")
    assert [tokens.dtype for tokens in found.tokens] == [np.int64] * 3
    assert (
        str(found)
        == f"3 examples of {sum(map(len, found.tokens))} tokens, {sum(each.sum() for each in found.trained)} of them targets"
    )


def test_a_template_may_say_what_is_generated(tokenizer):
    before, tokenizer.chat_template = tokenizer.chat_template, MARKED
    try:
        found = sl.data.examples([{"messages": TALK}], tokenizer)
        assert trained(found, tokenizer) == ["oneandone</s>twoandone</s>"]
    finally:
        tokenizer.chat_template = before


def test_examples_lose_their_end_and_those_without_targets_are_left_out(tokenizer):
    records = [{"text": "abc " * 40}, {"prompt": "abc " * 40, "completion": "d"}]
    found = sl.data.examples(records, tokenizer, length=16)
    assert [len(tokens) for tokens in found.tokens] == [16] and (found.cut, found.skipped) == (2, 1)
    assert str(found).endswith("; 2 cut; 1 without a target left out")
    row = sl.data.packed(found.tokens, 16, trained=found.trained)[0]
    assert row["targets"].tolist() == [*found.tokens[0][1:].tolist(), -100]


def test_targets_of_packed_documents():
    documents, flags = [[5, 6, 7], [8, 9], [4] * 5], [[0, 0, 1], [1, 1], [0, 1, 1, 0, 1]]
    rows = sl.data.packed(documents, 4, trained=flags, together=False)
    found = [rows[index]["targets"].tolist() for index in range(len(rows))]
    # The last document is cut: its first piece's last target is the first token of the rest.
    assert found == [[-100, 7, -100, -100], [9, -100, -100, -100], [4, 4, -100, 4], [-100] * 4]
    with pytest.raises(BatchError, match="has 2 documents of 5 tokens, and there are 3 of 10"):
        sl.data.packed(documents, 4, trained=flags[:2])


WRONG = {
    "other fields": ([{"question": "?"}], r"record 0: it has question"),
    "no text": ([{"prompt": "?", "completion": 3}], r"record 0: its fields are str and int, and no text"),
    "no dictionary": (["?"], "record 0: a str, and no dictionary"),
    "no roles": ([{"messages": ["?"]}], "record 0: its messages are no list of dictionaries"),
    "no targets": ([{"messages": TALK[:1]}], "none of 1 records has a token to train on"),
}


@pytest.mark.parametrize("what", WRONG)
def test_records_that_are_refused(what, tokenizer):
    records, message = WRONG[what]
    with pytest.raises(BatchError, match=message):
        sl.data.examples(records, tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [(FORGETFUL, "writes message 1 otherwise where others follow it"), (None, "no chat template")],
)
def test_templates_that_are_refused(template, message, tokenizer):
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        with pytest.raises(BatchError, match=message):
            sl.data.examples([{"messages": TALK}], tokenizer)
    finally:
        tokenizer.chat_template = before
