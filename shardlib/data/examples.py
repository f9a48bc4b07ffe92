"""Records of text, prompts with completions and conversations as tokens, with those that are trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardlib.errors import BatchError, listing

_FIELDS = "text; prompt and completion; or messages"


@dataclass(frozen=True)
class Examples:
    """The examples of `examples`, for ``packed(examples.tokens, sequence, trained=examples.trained)``.

    Attributes:
        tokens: of each example, int64.
        trained: for each token of each example, whether it is a target.
        cut: how many were longer than they may be.
        skipped: how many have no token to train on, within their length, and are left out.
    """

    tokens: Sequence[np.ndarray]
    trained: Sequence[np.ndarray]
    cut: int
    skipped: int

    def __len__(self) -> int:
        return len(self.tokens)

    def __str__(self) -> str:
        targets, tokens = sum(int(each.sum()) for each in self.trained), sum(map(len, self.tokens))
        notes = [f"{self.cut:,} cut"] * (self.cut > 0) + [f"{self.skipped:,} without a target left out"] * (
            self.skipped > 0
        )
        return f"{len(self):,} examples of {tokens:,} tokens, {targets:,} of them targets" + "".join(
            f"; {note}" for note in notes
        )


def examples(records: Iterable[Mapping[str, Any]], tokenizer: Any, length: int | None = None) -> Examples:
    """Tokens of records to fine-tune on, and which of them are targets. A record has

    - ``text``: every token is a target;
    - ``prompt`` and ``completion``, joined as they are: the tokens of the completion are;
    - ``messages``, a list of ``{"role": ..., "content": ...}``: the tokens that answer as the assistant, written by the
      tokenizer's chat template, are.

    The tokenizer's end-of-text token follows a text or a completion that does not end with it, as a target.

    Args:
        records: dictionaries, all of one kind or of several; other fields are not read.
        tokenizer: one of transformers, a fast one (``is_fast``), which knows where in the text a token lies.
        length: the most tokens of an example; longer ones lose their end.

    Raises:
        BatchError: a record has other fields, or fields that are no text; a template does not say which tokens are the
            assistant's, or there is none; lists all of them. No record has a target. The tokenizer is no fast one.

    >>> from transformers import PreTrainedTokenizerFast
    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> words = Tokenizer(models.WordLevel({"<end>": 0, "one": 1, "and": 2, "two": 3}, unk_token="<end>"))
    >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    >>> found = sl.data.examples([{"prompt": "one and", "completion": " two"}], tokenizer)
    >>> found.tokens[0].tolist(), found.trained[0].tolist()
    ([1, 2, 3, 0], [False, False, True, True])
    """
    if not getattr(tokenizer, "is_fast", False):
        raise BatchError(
            f"examples: {type(tokenizer).__name__} does not know where in the text a token lies: use a fast tokenizer of "
            "transformers, of AutoTokenizer.from_pretrained"
        )
    found, faults = [], []
    for number, record in enumerate(records):
        try:
            found.append(_encoded(record, tokenizer))
        except _Fault as fault:
            faults.append(f"record {number}: {fault}")
    if faults:
        raise BatchError(f"examples: records cannot be read:\n{listing(faults)}\nA record has {_FIELDS}")
    cut = sum(length is not None and len(tokens) > length for tokens, _ in found)
    kept = [(tokens[:length], trained[:length]) for tokens, trained in found]
    # The first token of an example is no target of any position.
    kept = [(tokens, trained) for tokens, trained in kept if trained[1:].any()]
    if not kept:
        raise BatchError(
            f"examples: none of {len(found)} records has a token to train on"
            + ("" if length is None else f" within {length} tokens: use longer examples, or other records")
        )
    tokens, trained = zip(*kept)
    return Examples(tokens, trained, cut, len(found) - len(kept))


class _Fault(Exception):
    """What is wrong with one record."""


def _encoded(record: Mapping[str, Any], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a record, and which of them are targets."""
    if not isinstance(record, Mapping):
        raise _Fault(f"a {type(record).__name__}, and no dictionary")
    if "messages" in record:
        return _conversation(record["messages"], tokenizer)
    if "text" in record:
        parts = ("", record["text"])
    elif "prompt" in record and "completion" in record:
        parts = (record["prompt"], record["completion"])
    else:
        raise _Fault(f"it has {', '.join(map(str, record)) or 'no fields'}")
    if not all(isinstance(part, str) for part in parts):
        raise _Fault(f"its fields are {' and '.join(type(part).__name__ for part in parts if part != '')}, and no text")
    prompt, completion = parts
    end = tokenizer.eos_token_id
    tokens, spans = _tokens(prompt + completion, tokenizer, special=True)
    trained = (spans[:, 1] > len(prompt)) & (spans[:, 0] < spans[:, 1])
    if not prompt:
        trained[:] = True  # tokens at the ends that the tokenizer adds, too
    if end is not None and (not len(tokens) or tokens[-1] != end):
        tokens, trained = np.append(tokens, end), np.append(trained, True)
    elif len(tokens):
        trained[-1] |= tokens[-1] == end
    return tokens, trained


def _conversation(messages: Any, tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a conversation, and which of them the assistant says."""
    if not tokenizer.chat_template:
        raise _Fault("it is a conversation, and the tokenizer has no chat template")
    if not isinstance(messages, list) or not all(isinstance(each, Mapping) and "role" in each for each in messages):
        raise _Fault("its messages are no list of dictionaries with a role and a content")
    try:
        if "{% generation" in tokenizer.chat_template or "{%- generation" in tokenizer.chat_template:
            written = tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return np.array(written["input_ids"], np.int64), np.array(written["assistant_masks"], bool)
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        answers = [_said(messages, number, text, tokenizer) for number in _assistants(messages)]
    except Exception as error:
        if type(error).__module__.partition(".")[0] != "jinja2":
            raise
        raise _Fault(f"the chat template refuses its messages: {error}") from None
    tokens, spans = _tokens(text, tokenizer, special=False)
    trained = np.zeros(len(tokens), bool)
    for first, stop in answers:
        trained |= (spans[:, 1] > first) & (spans[:, 0] < stop) & (spans[:, 0] < spans[:, 1])
    return tokens, trained


def _assistants(messages: Sequence[Mapping[str, Any]]) -> list[int]:
    return [number for number, message in enumerate(messages) if message["role"] == "assistant"]


def _said(messages: Sequence[Any], number: int, text: str, tokenizer: Any) -> tuple[int, int]:
    """Where in the text of a conversation an assistant's message lies: from behind the words that have it answer to the end
    of the message."""
    asked = tokenizer.apply_chat_template(messages[:number], tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(messages[: number + 1], tokenize=False)
    if not (answered.startswith(asked) and text.startswith(answered)):
        raise _Fault(
            f"the chat template writes message {number} otherwise where others follow it, so that nobody knows where it "
            "lies: mark it with {% generation %} in the template, or give conversations of one answer"
        )
    return len(asked), len(answered)


def _tokens(text: str, tokenizer: Any, special: bool) -> tuple[np.ndarray, np.ndarray]:
    """The tokens of a text, int64 (n,), and where each begins and ends, (n, 2); 0 and 0 for tokens of no text."""
    written = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    spans = np.array(written["offset_mapping"], np.int64).reshape(-1, 2)
    return np.array(written["input_ids"], np.int64), spans
