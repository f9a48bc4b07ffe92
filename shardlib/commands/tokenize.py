"""Write text to a token file, for `sl.data.tokens` and `sl.data.packed`."""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardlib.commands.arguments import WrongArguments
from shardlib.commands.lines import records_of
from shardlib.common.optional import require
from shardlib.data.files import TokenFileError, kind_of, write_tokens

_TOGETHER = 256  # documents that a tokenizer gets at once

Encode = Callable[[list[str]], Sequence[Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "inputs", nargs="*", type=Path, help="text files and folders of them; of .jsonl files one field of each line"
    )
    parser.add_argument("--out", type=Path, required=True, help="the token file")
    parser.add_argument(
        "--tokenizer", default="bytes", help="bytes, or the name or folder of a Hugging Face tokenizer (transformers)"
    )
    parser.add_argument("--per", choices=("file", "line"), default="file", help="what is a document in a text file")
    parser.add_argument("--field", default="text", help="the field or column that has the text")
    parser.add_argument("--dataset", help="name or folder of a Hugging Face dataset (datasets), in place of inputs")
    parser.add_argument("--split", default="train", help="the dataset's split")
    parser.add_argument("--no-end", action="store_true", help="write no end-of-text token behind each document")


def run(args: argparse.Namespace) -> int:
    if bool(args.inputs) == bool(args.dataset):
        raise WrongArguments("text files and folders, or --dataset: give one of them")
    if args.out.is_dir():
        raise WrongArguments(f"--out {args.out} is a folder: give the name of a file for the tokens")
    encode, vocabulary, end = _bytes() if args.tokenizer == "bytes" else _pretrained(args.tokenizer)
    texts = _rows(args.dataset, args.split, args.field) if args.dataset else _texts(args.inputs, args.per, args.field)
    start = time.perf_counter()
    try:
        documents = _encoded(texts, encode, None if args.no_end else end)
        file = write_tokens(args.out, documents, vocabulary=vocabulary, tokenizer=args.tokenizer)
    except (TokenFileError, OSError) as error:
        raise WrongArguments(str(error)) from None
    seconds = time.perf_counter() - start
    print(
        f"{args.out}: {len(file):,} tokens of {file.tokens.dtype.itemsize} bytes in {file.documents:,} documents, "
        f"{len(file) / seconds:,.0f} tokens per second"
    )
    return 0


def _bytes() -> tuple[Encode, int, int | None]:
    """The tokenizer whose tokens are the bytes of UTF-8; 0 ends a document."""
    return lambda texts: [text.encode() for text in texts], 256, 0


def _pretrained(name: str) -> tuple[Encode, int, int | None]:
    """A Hugging Face tokenizer, without tokens that it would add itself."""
    transformers = require("transformers", f"--tokenizer {name}", "transformers", "hf")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise WrongArguments(
            f"no tokenizer {name!r} ({error}); use --tokenizer bytes, or a tokenizer's folder"
        ) from None

    def encode(texts: list[str]) -> Sequence[Any]:
        return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]

    return encode, len(tokenizer), tokenizer.eos_token_id


def _encoded(texts: Iterable[str], encode: Encode, end: int | None) -> Iterator[Any]:
    texts = iter(texts)
    while together := list(itertools.islice(texts, _TOGETHER)):
        for tokens in encode(together):
            yield tokens if end is None else [*tokens, end]


def _texts(paths: Sequence[Path], per: str, field: str) -> Iterator[str]:
    """The documents of files and folders, in the order of their names. Hidden files are left out of folders."""
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no file or folder at {path}")
        inside = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
        for file in inside if path.is_dir() else [path]:
            with open(file, "rb") as content:
                if kind := kind_of(content.read(8)):
                    raise TokenFileError(
                        f"{file} is {kind.name} already: give the text that it was made of, or leave it out"
                    )
            if file.suffix == ".jsonl":
                yield from (_field(record, field, where) for where, record in records_of(file))
            elif per == "line":
                with open(file, encoding="utf-8", errors="replace") as lines:
                    yield from (text for line in lines if (text := line.rstrip("\n")))
            else:
                yield file.read_text(encoding="utf-8", errors="replace")


def _field(record: Any, field: str, where: str) -> str:
    if not isinstance(record, dict) or field not in record:
        raise WrongArguments(f"{where} is no JSON object with a field {field!r}; name the field by --field")
    found = record[field]
    if not isinstance(found, str):
        raise WrongArguments(f"{where}: the field {field!r} is {type(found).__name__}, not text; use another --field")
    return found


def _rows(name: str, split: str, field: str) -> Iterator[str]:
    """A column of a dataset: of a folder that ``save_to_disk`` wrote, or streamed by name."""
    datasets = require("datasets", "--dataset", "datasets", "data")
    if (Path(name) / "dataset_info.json").exists() or (Path(name) / "dataset_dict.json").exists():
        dataset = datasets.load_from_disk(name)
        dataset = dataset[split] if isinstance(dataset, dict) else dataset
    else:
        dataset = datasets.load_dataset(name, split=split, streaming=True)
    for row in dataset:
        if field not in row:
            raise WrongArguments(f"the dataset has no column {field!r}; --field is one of {', '.join(row)}")
        yield row[field]
